"""Logs of jobs: in order, searched, followed."""

import json
import os
import re
import time

import pytest
from live import until
from stage import BOB

import nexus

LOG_TIMES = [  # out, err as they grow: (which, bytes); the end of each step is noted
    ("in turns", [(0, b"a\n"), (1, b"b\n"), (0, b"c\n"), (1, b"d\n")], b"a\nb\nc\nd\n"),
    ("a line comes in two parts", [(0, b"a"), (1, b"b\n"), (0, b"a\n"), (1, b"d")], b"b\naa\nd"),
    ("a progress bar", [(1, b"\r10%"), (0, b"x\n"), (1, b"\r20%"), (0, b"y\n"), (1, b"\r30%\n")], b"\rx\n10%\ry\n20%\r30%\n"),
]


@pytest.mark.parametrize("reason, steps, expected", LOG_TIMES, ids=[row[0] for row in LOG_TIMES])
def test_both_streams_come_in_order(bench, reason, steps, expected):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    watch, now = bench.service.log_watch, 1e9
    watch.look()
    bench.service.clock.now = lambda: now
    path = f"/jobs/{job_id}/logs"
    followed = bench.get(path, {"follow": "true"}).stream
    live = b""
    for stream, piece in steps:
        with open(os.path.join(folder, ("stdout.log", "stderr.log")[stream]), "ab") as file:
            file.write(piece)
        now += 0.5
        watch.look()
        live += next(followed)
        now += 0.5
    bench.become(job_id, "completed", exit_code=0)
    assert watch.look() is None, "nobody runs, so nobody is watched"
    assert live + b"".join(followed) == b"".join(piece for _, piece in steps) or reason != "in turns"
    assert bench.ask("GET", path) == (200, expected)
    assert bench.ask("GET", path, query={"tail": "2"})[1] == b"".join(expected.splitlines(True)[-2:]) or reason != "in turns"
    entries = list(map(json.loads, b"".join(bench.get(path, headers={"accept": nexus.NDJSON}).stream).splitlines()))
    for name in ("stdout", "stderr"):
        own = [entry for entry in entries if entry["stream"] == name]
        with open(os.path.join(folder, f"{name}.log"), encoding="utf-8", newline="") as file:
            assert "".join(entry["text"] for entry in own) == file.read() and own[-1]["end"] == file.tell()
    if reason == "in turns":
        assert [entry["at"][-5:] for entry in entries] == ["40.5Z", "41.5Z", "42.5Z", "43.5Z"]
        assert bench.ask("GET", path, query={"timestamps": "true", "tail": "1"})[1] == b"2001-09-09T01:46:43.5Z d\n"
        os.unlink(os.path.join(folder, nexus.LOG_TIMES))
        assert bench.ask("GET", path)[1] == b"a\nc\nb\nd\n", "without the notes all is there"
        with open(os.path.join(folder, "stdout.log"), "ab") as file:
            file.write(b"x" * 200000 + b"\n")
        body = bench.ask("GET", path, query={"timestamps": "true", "stream": "stdout", "tail": "1"})[1]
        assert re.fullmatch(rb"- +x{200000}\n", body), "a long line has one time"


def test_what_both_streams_got_at_once_comes_as_the_times_of_the_files_tell(bench):
    """tqdm draws its bars to stderr, and the line between two of them goes to stdout; the next service knows it too."""
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    watch, path = bench.service.log_watch, f"/jobs/{job_id}/logs"
    paths = [os.path.join(folder, name) for name in ("stdout.log", "stderr.log")]

    def write(steps):
        for stream, piece in steps:
            with open(paths[stream], "ab") as file:
                file.write(piece)
            os.utime(paths[stream], ns=(0, next(ticks)))

    ticks = iter(range(10**18, 2 * 10**18, 4 * 10**6))
    write([(1, b"\r 1%\r99%\n"), (0, b"epoch 1\n"), (1, b"\r 1%")])
    watch.look()
    write([(1, b"\r99%\n"), (0, b"epoch 2\n")])
    assert bench.ask("GET", path, query={"tail": "4"})[1] == b"99%\nepoch 1\n99%\nepoch 2\n", "before it is noted"
    watch.look()
    watch.end()
    watch.growths.clear()
    assert bench.ask("GET", path, query={"tail": "4"})[1] == b"99%\nepoch 1\n99%\nepoch 2\n"
    watch.look()
    write([(1, b"a warning\n"), (0, b"the end\n")])
    assert bench.ask("GET", path, query={"tail": "5"})[1] == b"epoch 1\n99%\nepoch 2\na warning\nthe end\n"


def test_lines_have_their_times_also_after_the_clock_was_set_back(bench):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    clock, watch = bench.service.clock, bench.service.log_watch
    for number in range(8):
        clock.now, clock.monotonic = (lambda number=number: 1e9 + number - 3600 * (number > 2)), lambda number=number: 50.0 + number
        with open(os.path.join(folder, "stdout.log"), "a", encoding="ascii") as file:
            file.write(f"{number}\n")
        watch.look()
    bench.become(job_id, "completed", exit_code=0)
    watch.look()
    lines = bench.ask("GET", f"/jobs/{job_id}/logs", query={"timestamps": "true"})[1].decode().splitlines()
    assert lines == [f"2001-09-09T0{1 - (number > 2)}:46:{40 + number}.0Z {number}" for number in range(8)]


def make_huge(path):
    with open(path, "wb") as file:
        file.truncate(2**28)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_huge, lambda path: os.symlink("/dev/zero", path)],
                         ids=["a pipe", "a folder", "zeros", "a link"])
def test_what_a_job_leaves_in_the_place_of_its_log_times(bench, make):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    os.mkdir(folder)
    make(os.path.join(folder, nexus.LOG_TIMES))
    bench.become(job_id, "running", log_dir=folder)
    watch = bench.service.log_watch
    for name in ("stdout.log", "stderr.log"):
        watch.look()
        with open(os.path.join(folder, name), "w", encoding="ascii") as file:
            file.write(f"{name}\n" * 3)
    watch.look()
    began = time.process_time()
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"tail": "5"})[1] == b"stdout.log\n" * 2 + b"stderr.log\n" * 3
    watch.end()
    assert time.process_time() - began < 5


def test_logs(bench):
    job_id = bench.add()
    assert bench.ask("GET", f"/jobs/{job_id}/logs") == (200, b""), "nothing yet"
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    for name, content in (("stdout.log", b"a\nb\xff\nc"), ("stderr.log", b"x\ny\n")):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    for query, expected in [({}, b"a\nb\xff\nx\ny\nc"), ({"stream": "stdout"}, b"a\nb\xff\nc"), ({"stream": "stderr"}, b"x\ny\n"),
                            ({"tail": "1"}, b"c"), ({"tail": "2"}, b"y\nc"), ({"tail": "3"}, b"x\ny\nc"),
                            ({"offset": "2,2"}, b"b\xff\ny\nc"),
                            ({"tail": "2", "stream": "stderr"}, b"x\ny\n"), ({"tail": "0"}, b""),
                            ({"tail": "99", "stream": "stdout"}, b"a\nb\xff\nc")]:
        assert bench.ask("GET", f"/jobs/{job_id}/logs", query=query) == (200, expected), query
    for query, start, expected in [({"offset": "2"}, 2, b"b\xff\nc"), ({"offset": "6"}, 6, b""), ({"offset": "7"}, 0, b"a\nb\xff\nc"),
                                   ({"tail": "2"}, 2, b"b\xff\nc"), ({}, 0, b"a\nb\xff\nc")]:
        response = bench.respond("GET", f"/jobs/{job_id}/logs", query={"stream": "stdout", **query})
        assert (response.headers["Log-Offset"], b"".join(response.stream)) == (str(start), expected), query
    both = bench.respond("GET", f"/jobs/{job_id}/logs", query={"offset": "1", "tail": "2"})
    assert (both.headers["Log-Offset"], b"".join(both.stream)) == ("5,2", b"y\nc"), "what begins later counts"
    both = bench.respond("GET", f"/jobs/{job_id}/logs", query={"offset": "3", "tail": "9"})
    assert (both.headers["Log-Offset"], b"".join(both.stream)) == ("3,3", b"\xff\n\nc"), "what begins later counts"
    bench.become(job_id, "failed", exit_code=1)
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"follow": "true"}) == (200, b"a\nb\xff\nx\ny\nc"), "it ends"
    assert bench.ask("GET", f"/jobs/{job_id}/logs", query={"follow": "true", "offset": "5"}) == (200, b"x\ny\nc")


def make_logs(bench, out, err=b"", status="running"):
    job_id = bench.add()
    folder = os.path.join(bench.layout.log_dir, f"job_{job_id}")
    bench.become(job_id, "running", log_dir=folder)
    os.mkdir(folder)
    for name, content in (("stdout.log", out), ("stderr.log", err)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    if status != "running":
        bench.become(job_id, status, exit_code=0)
    return job_id, f"/jobs/{job_id}/logs"

GREPS = [  # query, what is found
    ({"grep": "loss"}, b"Loss 1\n30% loss 2\nloss 3\n"), ({"grep": "Loss"}, b"Loss 1\n"), ({"grep": "los."}, b""),
    ({"grep": "30%"}, b"30% loss 2\n"),
    ({"grep": "20%"}, b""), ({"grep": "loss", "stream": "stderr"}, b"loss 3\n"), ({"grep": "loss 3"}, b"loss 3\n"),
    ({"grep": "a", "context": "1"}, b"Loss 1\na\nb\n--\nc\nd a\ne\n"), ({"grep": "a", "context": "0"}, b"a\nd a\n"),
    ({"grep": "a", "offset": "9,0"}, b"d a\n"), ({"grep": "loss", "tail": "2"}, b"loss 3\n"),
    ({"grep": "loss 3", "timestamps": "true"}, b"-                      loss 3\n"), ({"grep": "c", "follow": "true"}, b"c\n"),
]


@pytest.mark.parametrize("query, found", GREPS, ids=[str(row[0]) for row in GREPS])
def test_logs_are_searched(bench, query, found):
    _, path = make_logs(bench, b"Loss 1\na\nb\nb\nc\nd a\ne\n 10%\r20%\r30% loss 2\n", b"x\nloss 3", "completed")
    assert bench.ask("GET", path, query=query) == (200, found)
    entries = map(json.loads, b"".join(bench.respond("GET", path, None, {"accept": nexus.NDJSON}, query).stream).splitlines())
    texts = ["--\n" * ("is_after_gap" in entry) + entry["text"] for entry in entries]
    assert "timestamps" in query or "".join(texts).encode() == found


def test_a_search_in_a_large_log_goes_on_where_the_last_reply_ended(bench, monkeypatch):
    """Each reply looks through so many bytes, in small steps, each of which looks whether the caller is still there."""
    monkeypatch.setattr(nexus, "MAX_SEARCH_BYTES", 10**6)
    lines = [b"line %d%s\n" % (number, b" needle" * (number % 10000 == 0)) for number in range(200000)]
    _, path = make_logs(bench, b"".join(lines), b"needle\n" * 3)
    query, found, replies = {"grep": "needle"}, b"", 0
    while query:
        response = bench.respond("GET", path, query=query)
        pieces = list(response.stream)
        assert (len(pieces) > 6 or "Log-Next" not in response.headers) and max(map(len, pieces)) < 2000, "small steps"
        found, replies = found + b"".join(pieces), replies + 1
        query = {"grep": "needle", "offset": response.headers["Log-Next"]} if "Log-Next" in response.headers else None
    assert sorted(found.splitlines(True)) == sorted([line for line in lines if b"needle" in line] + [b"needle\n"] * 3) and replies == 3
    followed = bench.respond("GET", path, query={"grep": "needle", "follow": "true"})
    assert followed.headers["Log-Next"] and b"".join(followed.stream).count(b"needle") > 3, "the next one follows"


def test_what_is_found_later_is_followed(bench):
    job_id, path = make_logs(bench, b"a 1\nb\na")
    stream = bench.respond("GET", path, query={"grep": "a", "follow": "true"}).stream
    assert next(stream) == b"a 1\n"
    with open(os.path.join(bench.layout.log_dir, f"job_{job_id}", "stdout.log"), "ab") as file:
        file.write(b" 2\nb\na 3")
    until(lambda: next(stream) == b"a 2\n")
    bench.become(job_id, "completed", exit_code=0)
    assert b"".join(stream) == b"a 3\n"


def test_two_searches_at_once_and_a_third_is_told_to_wait(bench):
    _, path = make_logs(bench, b"x\n" * 10**6)
    query = {"grep": "needle", "follow": "true"}
    first, second = [bench.respond("GET", path, query=query) for _ in range(2)]
    for again in (query, {"grep": "x"}):
        status, answer = bench.ask("GET", path, query=again)
        assert (status, answer["error"]) == (503, "unavailable") and "2 searches" in answer["message"] and answer["hint"]
    assert bench.ask("GET", path, query={"tail": "1"}) == (200, b"x\n"), "logs are shown as ever"
    first.after()                                   # its caller has gone: the connection's end calls that
    assert bench.ask("GET", path, query={"grep": "y"}) == (200, b"")
    third = bench.respond("GET", path, query=query)
    assert bench.ask("GET", path, query=query)[0] == 503
    until(lambda: next(second.stream) == b"" and len(bench.api.search_limit.searches) == 1, "it ends when it has seen what was there")
    third.after()


def test_a_log_that_is_followed_is_not_the_next_jobs_of_that_id(lab_bench):
    stream = lab_bench.respond("GET", f"/jobs/{lab_bench.ids[0]}/logs", None, BOB, {"follow": "true"}).stream
    assert next(stream) == b""
    job = lab_bench.store.state.jobs[lab_bench.ids[0]]

    def swap(state):
        yield nexus.Put("jobs", job.id, None)
        yield nexus.Put("jobs", job.id, nexus.replace(job, user="ann", number=999, log_dir="/etc"))
    lab_bench.store.update(swap)
    assert b"".join(stream) == b""


def test_a_revoked_token_ends_its_streams(lab_bench):
    stream = lab_bench.respond("GET", f"/jobs/{lab_bench.ids[0]}/logs", None, BOB, {"follow": "true"}).stream
    assert next(stream) == b""
    nexus.change_tokens(nexus.DISK, lab_bench.layout.tokens_file, lambda tokens: nexus.revoke_tokens(tokens, "bob"))
    with pytest.raises(nexus.NexusError, match="revoked"):
        next(stream)

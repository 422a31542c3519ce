"""What one request may cost: it grows no faster than what it names and what waits, and it is bounded."""

import gc
import json
import os
import time

import pytest
from test_server import OWNER, Bench
from test_service import World

import nexus

GPUS = 8
FEW, GROWTH = 400, 8            # a request about GROWTH times as many may cost 2 * GROWTH times as much; squared it is 64


def add_all(bench, jobs):
    status, answer = bench.ask("POST", "/queue", [{"command": "true", "gpus": 0, **job} for job in jobs])
    assert status == 200, answer
    return answer["ids"]


def add_layers(bench, count):
    """Layers of 20 jobs, each after all of the layer before."""
    layers = [[f"job-{at + number}" for number in range(20)] for at in range(0, count, 20)]
    return add_all(bench, [{"name": name, "after": before} for before, layer in zip([[], *layers], layers) for name in layer])


def add_named(bench, count, **fields):
    add_all(bench, [{"name": f"job-{number}", **fields} for number in range(count)])
    return [f"job-{number}" for number in range(count)]


def add_ended(bench, count):
    names = add_named(bench, count)
    bench.ask("POST", "/jobs/cancel", {"ids": names})
    return names


def add_held_group(bench, count):
    add_named(bench, count)
    ids = add_all(bench, [{"group": "g"}] * count)
    bench.store.update(lambda state: [nexus.Put("groups", "g", nexus.Group("g", hold="it failed"))])
    return ids


def add_often_retried(bench, count):
    """Ended jobs, each after one that was retried so often."""
    first = add_all(bench, [{}])[0]
    children = add_all(bench, [{"after_any": [first]} for _ in range(count)])
    bench.ask("POST", "/jobs/cancel", {"ids": [*children, first]})

    def retry(state):
        job = state.jobs[first]
        for number in range(count):
            again = nexus.replace(job, id=f"retry-{number}", number=state.next_number, retried_as=None)
            yield nexus.change_job(job, retried_as=again.id)
            yield from nexus.add_job(again)
            job = again

    bench.store.update(retry)
    return children


def add_ran(bench, count):
    """Ended jobs that ran for days, of as many groups as there may be and more."""
    ids = add_all(bench, [{"group": f"g{number % 30}"} for number in range(count)])
    now = bench.service.clock.now()

    def end(state):
        for number, job_id in enumerate(ids):
            attempt = nexus.Attempt(1, started_at=now - (number % 60 + 5.5) * 86400, finished_at=now - number % 60 * 86400)
            yield nexus.change_job(state.jobs[job_id], status=nexus.COMPLETED, attempts=(attempt,))

    bench.store.update(end)
    return ids


def add_collector(bench, count):
    names = add_named(bench, count)
    add_all(bench, [{"after_any": names}] * 3)
    return names


def add_one_name(bench, count):
    ids = add_all(bench, [{"name": "x"}] * count)
    bench.store.update(lambda state: [nexus.change_job(state.jobs[job_id], retried_as=ids[-1]) for job_id in ids[:-1]])
    return count


def add_group(bench, count):
    add_all(bench, [{"group": "g"}] * count)
    return count


def add_followed_group(bench, count):
    ids = add_all(bench, [{"group": "g"}] * count)
    add_all(bench, [{"after_group": ["g"]}] * count + [{"group": "h"}] * count)
    return ids


def long_name(number):
    return f"{'abcdefghij' * 12}-{number}"


REQUESTS = [  # reason, what it finds there, (method, path, body) of what that returned
    ("a change of a job behind many layers", add_layers, lambda ids: ("PATCH", f"/queue/{ids[-1]}", {"after": ids[-40:-20]})),
    ("the end of the first of many layers", add_layers, lambda ids: ("POST", "/jobs/cancel", {"ids": ids[:1]})),
    ("the end of all layers", add_layers, lambda ids: ("POST", "/jobs/cancel", {"ids": ids})),
    ("a job after many, by names", add_named, lambda names: ("POST", "/queue", {"command": "true", "after": names})),
    ("many after one name, which many had that were retried", add_one_name,
     lambda count: ("POST", "/queue", [{"command": "true", "after_any": ["x"]}] * count)),
    ("many after a group of many", add_group, lambda count: ("POST", "/queue", [{"command": "true", "after_group": ["g"]}] * count)),
    ("many join a group, after which many come", add_followed_group,
     lambda ids: ("POST", "/queue", [{"command": "true", "group": "g"}] * len(ids))),
    ("a ring through a group of many", add_followed_group,
     lambda ids: ("PATCH", f"/queue/{ids[0]}", {"after_any_group": ["h"]})),
    ("the end of a group, after which many come", add_followed_group, lambda ids: ("POST", "/jobs/cancel", {"ids": ids})),
    ("a chain, by names", lambda bench, count: count, lambda count: ("POST", "/queue", [
        {"command": "true", "name": f"job-{number}", "after": [f"job-{number - 1}"] if number else []} for number in range(count)])),
    ("the end of many, by names", add_named, lambda names: ("POST", "/jobs/cancel", {"ids": names})),
    ("the end of many, after all of which some come", add_collector, lambda names: ("POST", "/jobs/cancel", {"ids": names})),
    ("the end of many of a held group, behind others", add_held_group, lambda ids: ("POST", "/jobs/cancel", {"ids": ids})),
    ("retries, by names", add_ended, lambda names: ("POST", "/jobs/retry", {"ids": names})),
    ("retries, after one that was retried often", add_often_retried, lambda ids: ("POST", "/jobs/retry", {"ids": ids})),
    ("many are forgotten, by names", add_ended, lambda names: ("POST", "/jobs/clear", {"ids": names})),
    ("many that ran are forgotten", add_ran, lambda ids: ("POST", "/jobs/clear", {"ids": ids})),
    ("what many used", add_ran, lambda ids: ("GET", "/usage", None)),
    ("one that is named very often", add_named, lambda names: ("POST", "/jobs/cancel", {"ids": names[:1] * len(names) * 10})),
]


def measure(prepare, make_request, count):
    """The CPU time of a request."""
    with Bench(queue_limit=10**6) as bench:
        request = make_request(prepare(bench, count))
        gc.collect()
        began = time.thread_time()
        status, answer = bench.ask(*request)
        took_s = time.thread_time() - began
        assert status < 300, answer
        return took_s


@pytest.mark.parametrize("reason, prepare, make_request", REQUESTS, ids=[case[0] for case in REQUESTS])
def test_a_request_is_linear(reason, prepare, make_request):
    for _ in range(3):                  # a busy machine may slow down one of the two
        few_s, many_s = (measure(prepare, make_request, count) for count in (FEW, FEW * GROWTH))
        if many_s < 2 * GROWTH * few_s + 0.02:
            return
    raise AssertionError(f"{reason}: {many_s:.2f} s instead of {few_s:.3f} s for {GROWTH} times as many")


# What is shown of a queue costs as much whatever waits behind it


def add_of_two(bench, count, **fields):
    """Waiting jobs of two users, by turns, behind one that has ended."""
    bench.ask("POST", "/jobs/cancel", {"ids": add_all(bench, [fields])})
    jobs = [{"command": "true", "name": f"job-{number}", **fields} for number in range(count // 2)]
    for headers in (None, bench.make_bearer("bob")):
        status, answer = bench.ask("POST", "/queue", jobs, headers)
        assert status == 200, answer
    bench.decide()
    return answer["ids"]


def add_groups(bench, count):
    """Waiting jobs of ten groups, behind others of none."""
    ids = add_of_two(bench, count // 2)
    add_all(bench, [{"gpus": 1, "group": f"g{number % 10}"} for number in range(count // 2)])
    bench.decide()
    return ids


VIEWS = [  # reason, what waits, path, query
    ("the page", add_of_two, "/status", {"after": "0"}), ("the page, with groups", add_groups, "/status", {"after": "0"}),
    ("the page of a status", add_of_two, "/status", {"after": "0", "status": "pending"}),
    ("nexus", add_of_two, "/status", {}), ("groups", add_groups, "/groups", {}),
    ("the first jobs", add_of_two, "/queue", {"limit": "50"}),
    ("the first jobs of no group", add_groups, "/queue", {"limit": "50", "group": ""}),
    ("one's first jobs, in some fields", add_of_two, "/queue", {"limit": "50", "user": "bob", "fields": "id,position"}),
    ("the last job", add_of_two, "/jobs/{}", {}), ("why the last job waits", add_of_two, "/jobs/{}/why", {}),
]


def measure_view(prepare, path, query, count):
    """The least CPU time of some: estimates of starts are made once for all of them."""
    with Bench(queue_limit=10**6) as bench:
        path = path.format(prepare(bench, count)[-1])
        gc.collect()
        times = []
        for _ in range(6):
            began = time.thread_time()
            assert bench.ask("GET", path, query=query)[0] == 200
            times.append(time.thread_time() - began)
        return min(times)


@pytest.mark.parametrize("reason, prepare, path, query", VIEWS, ids=[case[0] for case in VIEWS])
def test_a_view_costs_what_it_shows(reason, prepare, path, query):
    for _ in range(3):
        few_s, many_s = (measure_view(prepare, path, query, count) for count in (FEW, FEW * GROWTH))
        if many_s < 1.5 * few_s + 0.002:
            return
    raise AssertionError(f"{reason}: {many_s * 1000:.1f} ms instead of {few_s * 1000:.1f} ms for {GROWTH} times as many")


def test_starts_are_estimated_once_a_plan(monkeypatch):
    """Whoever looks, and how often; after long ones, rarely: a page that is open must not cost a tenth of a core."""
    made, at, takes_s = [], [1000.0], [0.0]

    def estimate(*_):
        made.append(at[0])
        at[0] += takes_s[0]
        return {}

    monkeypatch.setattr(nexus, "estimate_starts", estimate)
    with Bench() as bench:
        bench.service.clock.monotonic = lambda: at[0]
        bench.service.clock.now = lambda: 1.8e9

        def look():
            for path, query in (("/queue", {}), ("/status", {"after": "0"}), ("/queue", {"limit": "1"})):
                bench.ask("GET", path, query=query)
                at[0] += 10

        add_all(bench, [{"gpus": 1}] * 3)
        bench.decide()
        for _ in range(3):
            look()
            bench.decide()                          # as at each look for processes: nothing has changed
        assert len(made) == 1
        takes_s[0] = 1.0
        add_all(bench, [{"gpus": 1}])
        look()
        assert len(made) == 2
        add_all(bench, [{"gpus": 1}])
        look()
        assert len(made) == 2, "not within a minute, as the last took a second"
        at[0] += 100
        look()
        assert len(made) == 3


def test_no_private_key_crosses_between_users(bench_of_10000):
    """In whatever order they look: what is kept of a row for one of them is not shown to another."""
    bench, tokens = bench_of_10000
    private = set(nexus.JOB) - nexus.PUBLIC_JOB_KEYS
    for user in (None, "bob", "ann", "bob", None, "ann"):
        response = bench.respond("GET", "/queue", headers=tokens[user], uid=OWNER if user is None else None)
        pieces = list(response.stream)
        jobs = json.loads(b"".join(pieces))
        assert len(jobs) == 10000 and response.headers["Total-Count"] == "10000" and len(pieces) > 10, "all, in pieces"
        assert [job["position"] for job in jobs] == list(range(10000))
        for job in jobs:
            if user in (None, job["user"]):
                assert f"of-{job['user']}" in job["command"] and job["waiting_for"]
            else:
                assert not any(job[key] for key in private)
        if user:
            others = {"bob", "ann", bench.service.user} - {user}
            assert not any(f"of-{other}".encode() in piece for other in others for piece in pieces)
        bench.ask("PATCH", f"/queue/{jobs[7]['id']}", {"name": f"changed-of-{jobs[7]['user']}"})
        assert bench.service.answers.texts[False].kept.keys() <= bench.store.state.jobs.keys()


@pytest.fixture
def bench_of_10000():
    with Bench(queue_limit=10**6) as bench:
        tokens = {None: None, "bob": bench.make_bearer("bob"), "ann": bench.make_bearer("ann")}
        for user, count in ((None, 4000), ("bob", 3000), ("ann", 3000)):
            jobs = [{"command": f"true {number} of-{user or bench.service.user}", "name": f"n-of-{user}", "group": f"g-of-{user}"}
                    for number in range(count)]
            status, answer = bench.ask("POST", "/queue", jobs, tokens[user])
            assert status == 200, answer
        bench.decide()
        yield bench, tokens


def test_a_name_that_is_like_thousands_is_compared_with_some(monkeypatch):
    import difflib
    compared = []
    find = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, names, *limits: compared.append(
        sum(map(len, [word * len(names), *names]))) or find(word, names, *limits))
    with Bench() as bench:
        add_all(bench, [{"name": long_name(number), "group": long_name(number)} for number in range(2000)])
        for request in (("GET", f"/jobs/{long_name('x')}"), ("POST", "/queue", {"command": "true", "after": [long_name("x")]}),
                        ("POST", "/jobs/cancel", {"group": long_name("x")})):
            status, answer = bench.ask(*request)
            assert status == 404 and "abcdefghij" in answer["hint"], answer
    assert compared and max(compared) <= 2 * nexus.MAX_COMPARED * nexus.MAX_COMPARED_LETTERS


def test_bash_reads_only_some_of_the_commands_of_a_request(monkeypatch):
    asked, run = [], nexus.run
    monkeypatch.setattr(nexus, "run", lambda argv, *rest: asked.append(argv) or run(argv, *rest))
    with Bench() as bench:
        for number in range(2):
            status, _ = bench.ask("POST", "/queue", {"commands": [f'echo "it\'s {number} {at}"' for at in range(500)]})
            assert status == 200 and len(asked) == nexus.MAX_PARSED
            asked.clear()
        assert bench.ask("POST", "/queue", {"command": "echo 'it"})[0] == 400


def test_what_is_not_known_of_the_gpus_is_waited_for_once():
    with Bench() as bench:
        waits = []
        bench.service.gpu_watch.first_probe.wait = waits.append
        add_all(bench, [{"gpus": 1, "gpu_mem_mib": number} for number in range(1, 50)])
        assert waits == [2.0]


MANY, FULL = nexus.MAX_JOBS + 1, nexus.MAX_PARENTS + 1
TOO_MUCH = [  # reason, method, path, body, status, words
    ("jobs", "POST", "/queue", [{"command": "a"}] * MANY, 400, "at most 100000"),
    ("commands", "POST", "/queue", {"commands": ["a"] * MANY}, 400, "at most 100000"),
    ("more than the queue ever takes", "POST", "/queue", {"commands": ["a"] * 10001}, 429, "queue_limit is 10000"),
    ("parents", "POST", "/queue", {"command": "a", "after": ["a"] * FULL}, 400, "at most 10000"),
    ("parents as text", "POST", "/queue", {"command": "a", "after_any": "a," * FULL + "a"}, 400, "at most 10000"),
    ("parents of a change", "PATCH", "/queue/abc", {"after": ["a"] * FULL}, 400, "at most 10000"),
    ("variables", "POST", "/queue", {"command": "a", "env": {f"V{at}": "" for at in range(10001)}}, 400, "at most 10000 keys"),
    *((f"ids to {what}", "POST", f"/jobs/{what}", {"ids": ["abc"] * MANY}, 400, "at most 100000") for what in ("cancel", "retry", "clear")),
]


@pytest.mark.parametrize("reason, method, path, body, status, words", TOO_MUCH, ids=[case[0] for case in TOO_MUCH])
def test_too_much_is_refused(reason, method, path, body, status, words):
    with Bench() as bench:
        bench.add(id="abc")
        seq = bench.store.state.seq
        given, answer = bench.ask(method, path, body)
        assert given == status and words in answer["message"], answer
        assert bench.store.state.seq == seq


def test_links_are_bounded_in_all(monkeypatch):
    """Of what waits and what is added together, by whichever way; what has ended does not count."""
    monkeypatch.setattr(nexus, "MAX_LINKS", 100)
    with Bench() as bench:
        ids = add_all(bench, [{}] * 10)
        children = add_all(bench, [{"after_any": ids}] * 9)
        assert bench.ask("POST", "/queue", [{"command": "a", "after": ids}] * 2)[0] == 429
        assert bench.ask("PATCH", f"/queue/{children[0]}", {"after": ids})[0] == 200
        assert bench.ask("PATCH", f"/queue/{children[1]}", {"after": ids[:1]})[0] == 429
        bench.ask("POST", "/jobs/cancel", {"ids": children})
        add_all(bench, [{"after": ids}] * 9)
        assert bench.ask("POST", "/jobs/retry", {"ids": children})[0] == 429


# What a turn of the service costs, whatever number of jobs start and end in it


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """A service whose jobs have been launched on all GPUs, with as many that wait; and counts of what it does."""
    w = World(tmp_path, gpus=GPUS)
    ids = [w.add(f"python train.py {number}") for number in range(2 * GPUS)]
    w.turn()
    w.counts = dict.fromkeys(("lines", "syncs", "looks"), 0)

    def count(owner, name, what):
        real = getattr(owner, name)

        def counted(*given, **named):
            w.counts[what] += 1
            return real(*given, **named)
        monkeypatch.setattr(owner, name, counted)

    count(w.store.journal, "append", "lines")
    count(w.disk, "fdatasync", "syncs")
    count(w.machine.processes, "find_members", "looks")
    yield w, ids[:GPUS], ids[GPUS:]
    w.close()


def say_started(number, job_id):
    return f"start {job_id} 1 {100 + number} {1000 + 10 * number} {1000 + 10 * number}"


def test_what_is_heard_of_many_starts_is_one_line_of_the_journal(busy):
    w, ids, _ = busy
    w.turn(*(say_started(number, job_id) for number, job_id in enumerate(ids)))
    assert [w.job(job_id).current.pid for job_id in ids] == list(range(100, 100 + GPUS))
    assert w.counts == {"lines": 1, "syncs": 0, "looks": 0}         # job.sh has written the same into its claim


@pytest.mark.parametrize("is_known", [True, False], ids=["known to run", "starts and ends at once"])
def test_many_ends_and_the_starts_after_them_share_all_that_waits(busy, is_known):
    w, ids, waiting = busy
    starts = [say_started(number, job_id) for number, job_id in enumerate(ids)]
    if is_known:
        w.turn(*starts)
        w.counts.update(lines=0)
    w.turn(*([] if is_known else starts), *(f"end {job_id} 1 0 250" for job_id in ids))
    assert w.counts == {"lines": 1, "syncs": 1, "looks": 1}
    assert {(w.job(job_id).status, w.job(job_id).attempts[-1].pid is None) for job_id in ids} == {("completed", False)}
    assert {w.job(job_id).status for job_id in waiting} == {"running"} and len(w.machine.launched) == 2 * GPUS


def test_what_jobs_share_in_job_sh_is_quoted_once(monkeypatch):
    nexus.quote_variable.cache_clear()
    quoted, quote = [], nexus.quote
    monkeypatch.setattr(nexus, "quote", lambda text: quoted.append(text) or quote(text))
    shared = {f"SHARED_{number}": f"a text {number} of {os.getpid()}" for number in range(100)}
    first, second = (nexus.build_assignments({**shared, "NEXUS_JOB_ID": job_id}, False) for job_id in ("abc", "abd"))
    assert len(quoted) == 100 + 2 and first[0] == {**second[0], "NEXUS_JOB_ID": "NEXUS_JOB_ID=abc"}


def test_the_texts_that_are_kept_are_few_and_short():
    nexus.build_assignments({f"V{number}": "x" * 999999 for number in range(3)}, False)
    before = nexus.quote_variable.cache_info()
    nexus.build_assignments({"LONG": "x" * nexus.MAX_CACHED}, False)
    assert nexus.quote_variable.cache_info() == before
    assert before.maxsize * nexus.MAX_CACHED <= 2**20

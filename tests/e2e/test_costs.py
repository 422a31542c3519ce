"""What one request may cost: it grows no faster than what it names and what waits, and it is bounded."""

import contextlib
import functools
import gc
import json
import os
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import samples
from live import PATIENCE_S, until
from makers import indexes_of
from stage import OWNER, Bench
from turns import World

import nexus

GPUS = 8
FEW, GROWTH = samples.count(100, 400), 8            # so many more may cost half as much again, each; squared it is 64 times


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


@pytest.fixture(scope="module")
def prepared():
    """Makes what requests find once for all of them: (a bench, what `prepare` returned).  Each finds it as it was made."""
    with contextlib.ExitStack() as held:
        @functools.lru_cache(None)
        def make(prepare, count):
            bench = held.enter_context(Bench(queue_limit=10**6))
            return bench, prepare(bench, count), bench.store.state

        def find(prepare, count):
            bench, found, bench.store.state = make(prepare, count)
            return bench, found

        yield find


@contextlib.contextmanager
def no_collection():
    """What Python frees meanwhile depends on all that the tests have made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(bench, request):
    """The CPU time of a request."""
    with no_collection():
        began = time.thread_time()
        status, answer = bench.ask(*request)
        took_s = time.thread_time() - began
    assert status < 300, answer
    return took_s


@pytest.mark.parametrize("reason, prepare, make_request", REQUESTS, ids=[case[0] for case in REQUESTS])
def test_a_request_is_linear(reason, prepare, make_request, prepared):
    for _ in range(5):                  # a busy machine may slow down one of the two
        found = (prepared(prepare, count) for count in (FEW, FEW * GROWTH))
        few_s, many_s = (measure(bench, make_request(what)) for bench, what in found)
        if many_s < 1.5 * GROWTH * few_s + 0.01:
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
    add_of_two(bench, count // 2)
    ids = add_all(bench, [{"gpus": 1, "group": f"g{number % 10}"} for number in range(count // 2)])
    bench.decide()
    return ids


VIEWS = [  # reason, path, query
    ("the page", "/status", {"after": "0"}), ("the page of a status", "/status", {"after": "0", "status": "pending"}),
    ("nexus", "/status", {}), ("groups", "/groups", {}), ("the first jobs", "/queue", {"limit": "50"}),
    ("the first jobs of no group", "/queue", {"limit": "50", "group": ""}),
    ("one's first jobs, in some fields", "/queue", {"limit": "50", "user": "bob", "fields": "id,position"}),
    ("the last job", "/jobs/{}", {}), ("why the last job waits", "/jobs/{}/why", {}),
]


@pytest.fixture(scope="module")
def queues():
    """[(a bench, its last job)] with few jobs that wait, and with many: who looks changes nothing."""
    with Bench(queue_limit=10**6) as few, Bench(queue_limit=10**6) as many:
        yield [(bench, add_groups(bench, count)[-1]) for bench, count in ((few, 400), (many, 400 * GROWTH))]


def measure_view(bench, path, query):
    """The least CPU time of some: estimates of starts are made once for all of them."""
    times = []
    with no_collection():
        for _ in range(6):
            began = time.thread_time()
            assert bench.ask("GET", path, query=query)[0] == 200
            times.append(time.thread_time() - began)
    return min(times)


@pytest.mark.parametrize("reason, path, query", VIEWS, ids=[case[0] for case in VIEWS])
def test_a_view_costs_what_it_shows(queues, reason, path, query):
    for _ in range(3):
        few_s, many_s = (measure_view(bench, path.format(last), query) for bench, last in queues)
        if many_s < 1.5 * few_s + 0.002:
            return
    raise AssertionError(f"{reason}: {many_s * 1000:.1f} ms instead of {few_s * 1000:.1f} ms for {GROWTH} times as many")


# What is held until there is something new takes a part of the time that does not grow with how many there are

LOOKS = [  # reason, (user, CPU seconds of a look) of each that waits, how long the last one waits
    ("one", [("bob", 0.0004)], 0.1), ("few", [("bob", 0.0004)] * 20, 0.1),
    ("250 of one user", [("bob", 0.0004)] * 250, 1.0),
    ("another's beside them", [("bob", 0.0004)] * 250 + [("ann", 0.0004)], 0.1),
    ("250 that each look for long", [("bob", 0.02)] * 250, 3.0),
    ("one beside a log of which much was read", [("bob", 60.0), ("bob", 0.01)], 0.6),
]


@pytest.mark.parametrize("reason, looks, expected", LOOKS, ids=[case[0] for case in LOOKS])
def test_a_users_requests_look_by_turns(monkeypatch, reason, looks, expected):
    clock, pauses = nexus.Clock(), []
    clock.monotonic, clock.sleep = lambda: 1000.0, pauses.append
    it, used_s = nexus.PollThrottle(clock), [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: used_s[0])
    for user, look_s in looks:
        held = nexus.HeldRequest(it, nexus.Identity(user, user))
        used_s[0] += look_s
        held.pause()
    assert pauses[-1] == pytest.approx(expected)


HELD = [  # reason, path, query
    ("a log that is followed", "/jobs/{}/logs", {"follow": "1"}), ("its next bytes", "/jobs/{}/logs", {"wait": "60"}),
    ("one that is searched", "/jobs/{}/logs", {"follow": "1", "grep": "x"}), ("the end of a job", "/jobs/{}", {"wait": "60"}),
    ("what changes", "/status", {"after": "{}"}), ("the service's log", "/service/logs", {"follow": "1"}),
]


@pytest.mark.parametrize("reason, path, query", HELD, ids=[case[0] for case in HELD])
def test_what_is_held_takes_turns(reason, path, query):
    with Bench() as bench:
        job_id, charged, me = bench.add(), [], nexus.find_user(os.geteuid())
        bench.api.throttle.charge = lambda user, used_s: charged.append((user, 0 <= used_s < 5)) or 0.0
        version = bench.ask("GET", "/status", query={"after": "0"})[1]["state_version"]
        charged.clear()
        stream = bench.get(path.format(job_id), {key: text.format(version) for key, text in query.items()}).stream
        assert [next(stream) for _ in range(3)] == [b""] * 3 and set(charged) == {(me, True)} and len(charged) in (2, 3)


WORKED_OUT = [  # reason, path, query, what takes long of it
    ("an answer", "/groups", {}, "groups.list_groups"),
    ("a list that comes in pieces", "/jobs", {"fields": "id"}, "job_serializer.describe_jobs"),
]


@pytest.mark.parametrize("reason, path, query, part", WORKED_OUT, ids=[case[0] for case in WORKED_OUT])
def test_a_users_requests_are_worked_out_a_few_at_once(monkeypatch, reason, path, query, part):
    with Bench() as bench, ThreadPoolExecutor(3 * nexus.USER_TURNS) as pool:
        add_all(bench, [{}] * (nexus.JOBS_A_PIECE + 1))
        bob, ann = (bench.make_bearer(user) for user in ("bob", "ann"))
        owner, _, method = part.partition(".")
        component, at_once, going_on = getattr(bench.service, owner), [], threading.Event()
        real = getattr(component, method)

        def take_long(*given):
            if not going_on.is_set() and threading.current_thread() is not threading.main_thread():
                at_once.append(given)
                assert going_on.wait(PATIENCE_S)
            return real(*given)

        monkeypatch.setattr(component, method, take_long)
        asked = [pool.submit(bench.ask, "GET", path, None, bob, query) for _ in range(3 * nexus.USER_TURNS)]
        assert until(lambda: len(at_once) == nexus.USER_TURNS)
        assert [bench.ask("GET", path, None, who, query)[0] for who in ({}, ann)] == [200, 200] and len(at_once) == nexus.USER_TURNS
        going_on.set()
        assert {each.result()[0] for each in asked} == {200}


def test_who_asks_anew_at_once_looks_no_more_often(monkeypatch):
    """As a page does, whose every request has news."""
    with Bench() as bench:
        slept = []
        monkeypatch.setattr(bench.service.clock, "sleep", slept.append, raising=False)
        monkeypatch.setattr(time, "thread_time", lambda: bench.service.overview.looks)
        bench.service.overview.looks = 0.0
        look = bench.service.overview.find_changes

        def look_long(*given):
            bench.service.overview.looks += 0.02
            return look(*given)

        bench.service.overview.find_changes = look_long
        for _ in range(100):
            assert bench.ask("GET", "/status", query={"after": "0"})[0] == 200
        assert slept[0] == 0 and slept[-1] == pytest.approx(3.0, abs=0.1)


def test_starts_are_estimated_once_a_plan(monkeypatch):
    """Whoever looks, and how often; after long ones, rarely: a page that is open must not cost a tenth of a core."""
    made, at, takes_s = [], [0.0], [0.0]                # before the GPUs were read: so their reading is never old

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


def test_no_private_key_crosses_between_users(bench_of_three_users):
    """In whatever order they look: what is kept of a row for one of them is not shown to another."""
    bench, tokens = bench_of_three_users
    private = set(nexus.JOB) - nexus.PUBLIC_JOB_KEYS
    for user in (None, "bob", "ann", "bob", None, "ann"):
        response = bench.respond("GET", "/queue", headers=tokens[user], uid=OWNER if user is None else None)
        pieces = list(response.stream)
        jobs = json.loads(b"".join(pieces))
        assert len(jobs) == 1000 and response.headers["Total-Count"] == "1000" and len(pieces) >= 5, "all, in pieces"
        assert [job["position"] for job in jobs] == list(range(1000))
        for job in jobs:
            if user in (None, job["user"]):
                assert f"of-{job['user']}" in job["command"] and job["waiting_for"]
            else:
                assert not any(job[key] for key in private)
        if user:
            others = {"bob", "ann", bench.service.user} - {user}
            assert not any(f"of-{other}".encode() in piece for other in others for piece in pieces)
        bench.ask("PATCH", f"/queue/{jobs[7]['id']}", {"name": f"changed-of-{jobs[7]['user']}"})
        assert bench.service.job_serializer.texts[False].kept.keys() <= bench.store.state.jobs.keys()


@pytest.fixture
def bench_of_three_users():
    with Bench(queue_limit=10**6) as bench:
        tokens = {None: None, "bob": bench.make_bearer("bob"), "ann": bench.make_bearer("ann")}
        for user, count in ((None, 400), ("bob", 300), ("ann", 300)):
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


def test_what_is_not_known_of_the_gpus_is_waited_for_once():
    with Bench() as bench:
        waits = []
        bench.service.gpu_watch.first_probe.wait = waits.append
        add_all(bench, [{"gpus": 1, "gpu_mem_mib": number} for number in range(1, 50)])
        assert waits == [2.0]


TOO_MANY, FULL = nexus.MAX_JOBS + 1, nexus.MAX_PARENTS + 1
TOO_MUCH = [  # reason, method, path, body, status, words
    ("jobs", "POST", "/queue", [{"command": "a"}] * TOO_MANY, 400, "at most 100000"),
    ("commands", "POST", "/queue", {"commands": ["a"] * TOO_MANY}, 400, "at most 100000"),
    ("more than the queue ever takes", "POST", "/queue", {"commands": ["a"] * 10001}, 429, "queue_limit is 10000"),
    ("parents", "POST", "/queue", {"command": "a", "after": ["a"] * FULL}, 400, "at most 10000"),
    ("parents as text", "POST", "/queue", {"command": "a", "after_any": "a," * FULL + "a"}, 400, "at most 10000"),
    ("parents of a change", "PATCH", "/queue/abc", {"after": ["a"] * FULL}, 400, "at most 10000"),
    ("variables", "POST", "/queue", {"command": "a", "env": {f"V{at}": "" for at in range(10001)}}, 400, "at most 10000 keys"),
    ("a time that is asked for", "POST", "/jobs/dismiss", {"since": "1d" * 100000}, 400, "at most 100 characters"),
    ("statuses", "POST", "/jobs/cancel", {"status": ["failed"] * 1000000}, 400, "at most 20"),
    ("a text that is looked for", "POST", "/jobs/clear", {"text": "x" * 10**7}, 400, "at most 4096 characters"),
    ("a pattern of names", "POST", "/jobs/retry", {"name": "[" * 10**6}, 400, "at most 200 characters"),
    ("a name", "POST", "/jobs/cancel", {"ids": ["[" * 10**6]}, 400, "at most 200 characters"),
    *((f"ids to {what}", "POST", f"/jobs/{what}", {"ids": ["abc"] * TOO_MANY}, 400, "at most 100000")
      for what in ("cancel", "retry", "clear")),
]


@pytest.mark.parametrize("reason, method, path, body, status, words", TOO_MUCH, ids=[case[0] for case in TOO_MUCH])
def test_too_much_is_refused(reason, method, path, body, status, words):
    with Bench() as bench:
        bench.add(id="abc")
        seq = bench.store.state.seq
        given, answer = bench.ask(method, path, body)
        assert given == status and words in answer["message"], answer
        assert bench.store.state.seq == seq


FILTERS = [  # a query of lists and of the page
    {"since": "1d" * 500}, {"status": ",".join(["failed"] * 21)}, {"text": "x" * 5000}, {"name": "*a" * 101}, {"group": "g" * 201}]


@pytest.mark.parametrize("query", FILTERS, ids=[next(iter(query)) for query in FILTERS])
@pytest.mark.parametrize("path", ["/jobs", "/status"])
def test_a_filter_of_a_list_has_a_length(path, query):
    with Bench() as bench:
        status, answer = bench.ask("GET", path, query={**query, "after": "0"} if path == "/status" else query)
        assert status == 400 and "at most" in answer["message"]


def test_a_name_in_an_address_that_is_too_long_is_nobody_s():
    with Bench() as bench:
        began = time.thread_time()
        for path in ("/jobs/{}", "/jobs/{}/logs", "/groups/{}/results"):
            assert bench.ask("GET", path.format("[" * 60000))[0] == 404
        assert time.thread_time() - began < 2


CHANGES = [  # (method, path, what beside the choice), the status of what it is for
    ("POST", "/jobs/cancel", {}, "pending"), ("POST", "/jobs/dismiss", {}, "failed"), ("POST", "/jobs/retry", {}, "failed"),
    ("PATCH", "/queue", {"change": {"retries": 3}}, "pending")]


@pytest.mark.parametrize("method, path, more, status", CHANGES, ids=[case[1] for case in CHANGES])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "filtered"])
def test_what_is_chosen_is_chosen_before_the_lock_and_checked_under_it(method, path, more, status, is_named, monkeypatch):
    """One job is changed between the two so that it is not chosen any more."""
    with Bench() as bench:
        ids = [bench.add(group="g") for _ in range(3)]
        for job_id in ids if status == "failed" else ():
            bench.become(job_id, "failed")
        choose, update = nexus.choose_jobs, bench.store.update

        def choose_outside(*given):
            assert not bench.store.committing.locked()
            return choose(*given)

        def change_before(*given, **named):
            monkeypatch.setattr(bench.store, "update", update)
            update(lambda state: [nexus.change_job(state.jobs[ids[1]], group="other")])
            return update(*given, **named)

        monkeypatch.setattr(nexus, "choose_jobs", choose_outside)
        monkeypatch.setattr(bench.store, "update", change_before)
        before = dict(bench.store.state.jobs)
        code, answer = bench.ask(method, path, {"group": "g", **({"ids": ids} if is_named else {}), **more})
        changed = [job_id for job_id in ids if bench.store.state.jobs[job_id] != before[job_id]]
        if is_named:
            assert code == 409 and f"job {ids[1]} is not of group 'g'" in answer["message"] and changed == [ids[1]], answer
        else:
            assert code < 300 and changed == ids and bench.store.state.jobs[ids[1]].group == "other"
            assert bench.store.state.jobs[ids[1]] == nexus.replace(before[ids[1]], group="other")


def test_patterns_of_names_do_not_stay_in_memory():
    """Python itself keeps 512 of the last patterns, which are short."""
    def measure(first, end):
        for number in range(first, end):
            assert not nexus.Choice(name=f"{number}-*a*").make_test(0.0)(nexus.Job("abc", "true", "/", "me", 0.0, (0, 1, 1), ""))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few, many = measure(0, 600), measure(600, 1300)
    finally:
        tracemalloc.stop()
    assert many < 1.3 * few < 20e6


def test_no_pattern_of_names_takes_long():
    for pattern in ("*a" * 99 + "b", "*?" * 99 + "b", "*[!b]" * 39 + "b", "*" + "a" * 100 + "b*"):
        fits = nexus.Choice(name=pattern).make_test(0.0)
        began = time.thread_time()
        assert not any(fits(nexus.Job("abc", "true", "/", "me", 0.0, (0, 1, 1), "", name="a" * 200)) for _ in range(100))
        assert time.thread_time() - began < 1


BODIES = [  # reason, who, body, words
    ("a user's body", "bob", b'{"ids": ["' + b"a" * nexus.MAX_USER_BODY_BYTES + b'"]}', "with a user's token"),
    ("millions of lists", "bob", b'{"ids": [[]' + b",[]" * 2_000_000 + b"]}", "values"),
    ("the owner's millions", None, b'{"ids": [[]' + b",[]" * 2_000_000 + b"]}", "values")]


@pytest.mark.parametrize("reason, user, body, words", BODIES, ids=[case[0] for case in BODIES])
def test_a_body_that_takes_long_to_parse_is_not_parsed(reason, user, body, words, monkeypatch):
    monkeypatch.setattr(nexus, "parse_json", None)
    with Bench() as bench:
        headers = {"content-type": "application/json", **(bench.make_bearer(user) if user else {})}
        response = bench.respond("POST", "/jobs/cancel", body, headers, uid=None if user else OWNER)
        assert response.status == 413 and words.encode() in response.body


# What is large is done beside others: they wait only until it is written


LARGE = [  # reason, what there is, (method, path, body) of what that returned
    ("an add", lambda bench: None, lambda _: ("POST", "/queue", {"commands": ["true"] * 150})),
    ("an add after one", lambda bench: bench.add(name="first"),
     lambda _: ("POST", "/queue", {"commands": ["true"] * 150, "after": ["first"]})),
    ("a cancel", lambda bench: add_all(bench, [{}] * 150), lambda ids: ("POST", "/jobs/cancel", {"ids": ids})),
    ("a cancel of what many come after", lambda bench: add_all(bench, [{"name": "first"}, *[{"after": ["first"]}] * 150]),
     lambda ids: ("POST", "/jobs/cancel", {"ids": ids[:1]})),
    ("a change", lambda bench: add_all(bench, [{}] * 150), lambda ids: ("PATCH", "/queue", {"ids": ids, "change": {"name": "x"}})),
    ("a change to a group that has a fact's name", lambda bench: add_all(bench, [{}] * 150),
     lambda ids: ("PATCH", "/queue", {"ids": ids, "change": {"group": "next_number", "max_concurrent": 2}})),
    ("a retry", lambda bench: add_ended(bench, 150), lambda ids: ("POST", "/jobs/retry", {"ids": ids})),
    ("a clear", lambda bench: add_ended(bench, 150), lambda ids: ("POST", "/jobs/clear", {"ids": ids})),
]


@pytest.mark.parametrize("reason, prepare, make_request", LARGE, ids=[case[0] for case in LARGE])
def test_others_change_the_state_beside_what_is_large(reason, prepare, make_request, monkeypatch):
    """All is computed, while another's add is done in the midst of it; and once only."""
    with Bench(queue_limit=10**6) as bench:
        request = make_request(prepare(bench))
        made, real, others = [], nexus.make_changes, []

        def make_changes(draft, decided):
            found = real(draft, decided)
            made.append(len(found[0]))
            if len(found[0]) > 100 and not others:
                others.append(bench.ask("POST", "/queue", {"command": "true"}, bench.make_bearer("bob"))[1]["id"])
            return found

        monkeypatch.setattr(nexus, "make_changes", make_changes)
        status, answer = bench.ask(*request)
        assert status < 300 and len(others) == 1 and sum(count > 100 for count in made) == 1, answer
        jobs, numbers = bench.store.state.jobs, [job.number for job in bench.store.state.jobs.values()]
        assert others[0] in jobs and len({*numbers}) == len(numbers) and bench.store.state.next_number > max(numbers)
        again = nexus.Store(bench.layout, bench.service.clock, bench.service.disk, bench.store.log)
        again.recover()
        assert again.state.jobs == jobs
        assert again.state.next_number == bench.store.state.next_number and indexes_of(again.state) == indexes_of(bench.store.state)


def test_what_meets_others_again_and_again_comes_to_an_end(monkeypatch):
    """It is tried beside them some times, each time from what is there then, and at last they wait."""
    with Bench() as bench:
        ids, names, real = add_all(bench, [{}] * 200), [], nexus.encode_puts

        def encode_puts(changes):
            if len(changes) >= 200 and not bench.store.committing.locked():
                names.append(f"name-{len(names)}")
                bench.store.update(lambda state: [nexus.change_job(state.jobs[ids[0]], name=names[-1])])
            return real(changes)

        monkeypatch.setattr(nexus, "encode_puts", encode_puts)
        assert bench.ask("PATCH", "/queue", {"ids": ids, "change": {"retries": 2}})[0] == 200
        jobs = [bench.store.state.jobs[job_id] for job_id in ids]
        assert len(names) == nexus.LARGE_TRIES and jobs[0].name == names[-1] and {job.retries for job in jobs} == {2}
        assert not bench.store.watching


def end(name, status):
    """What the service does when a job starts, or has ended."""
    def change(state):
        job = next(job for job in state.jobs.values() if job.name == name)
        yield nexus.change_status(nexus.begin_attempt(job, started_at=1.7e9), "running", 1.7e9)
        if status != "running":
            yield from nexus.end_job(state, state.jobs[job.id], status, 1.7e9)

    def act(bench):
        try:
            bench.store.update(change)
        except nexus.NexusError as error:
            return error.http_status
        return 200

    return act


def send(method, path, body, user="bob"):
    headers = {"authorization": f"Bearer secret-of-{user}"} if user else None
    return lambda bench: bench.ask(method, path, body, headers)[0]


DEEDS = {  # of the user bob, of the owner (None), or of the service
    "cancel a parent": send("POST", "/jobs/cancel", {"ids": ["parent"]}), "cancel the group": send("POST", "/jobs/cancel", {"group": "g"}),
    "the parent fails": end("parent", "failed"), "the parent completes": end("parent", "completed"),
    "one of the group completes": end("member", "completed"), "the parent starts": end("parent", "running"),
    "add a child": send("POST", "/queue", {"command": "a", "name": "new", "after": ["parent"]}),
    "the owner adds a child": send("POST", "/queue", {"command": "a", "name": "own", "after": ["parent"]}, None),
    "add to the group": send("POST", "/queue", {"command": "b", "name": "more", "group": "g"}),
    "the owner adds to the group": send("POST", "/queue", {"command": "b", "name": "mine", "group": "g"}, None),
    "add after the group": send("POST", "/queue", {"command": "c", "name": "later", "after_group": ["g"]}),
    "add once": send("POST", "/queue", {"command": "once", "name": "once", "unique": True}),
    "join a new group": send("PATCH", "/queue", {"ids": ["alone"], "change": {"group": "new"}}),
    "another joins a new group": send("POST", "/queue", {"command": "d", "name": "anns", "group": "new"}, "ann"),
    "retry": send("POST", "/jobs/retry", {"ids": ["lost"]}), "forget": send("POST", "/jobs/clear", {"ids": ["lost"]}),
    "add after what was lost": send("POST", "/queue", {"command": "e", "name": "after-lost", "after_any": ["lost"]}),
    "rename": send("PATCH", "/queue", {"ids": ["alone"], "change": {"name": "renamed"}}),
    "half a ring": send("PATCH", "/queue", {"ids": ["ring-1"], "change": {"after": ["ring-2"]}}, None),
    "the rest of the ring": send("PATCH", "/queue", {"ids": ["ring-3"], "change": {"after": ["ring-4"]}}, None),
    "a ring by a group": send("POST", "/queue", {"command": "f", "name": "round", "group": "g", "after": ["ring-4"]}, None),
    "the rest by a group": send("PATCH", "/queue", {"ids": ["ring-1"], "change": {"after": ["follower"]}}),
    "half of a held group": send("POST", "/jobs/cancel", {"ids": ["held-1"]}),
    "the rest of a held group": send("POST", "/jobs/cancel", {"ids": ["held-2"]}),
    "first": send("PATCH", "/queue", {"ids": ["ring-1", "ring-3"], "change": {"position": 0}}, None),
    "another first": send("PATCH", "/queue", {"ids": ["alone"], "change": {"position": 0}}, None),
    "before another": send("PATCH", "/queue", {"ids": ["ring-4"], "change": {"before": "second"}}, None),
}
JOBS = [  # that are there before; two are the owner's
    {"name": "parent"}, {"name": "child", "after": ["parent"]}, {"name": "member", "group": "g"}, {"name": "second", "group": "g"},
    {"name": "follower", "after_group": ["g"]}, {"name": "alone"}, {"name": "lost"}, {"name": "ring-3", "user": None},
    {"name": "ring-2", "after": ["ring-3"], "user": None}, {"name": "ring-1"}, {"name": "ring-4", "after": ["ring-1"]},
    {"name": "held-1", "group": "held"}, {"name": "held-2", "group": "held"}]


def describe_world(bench):
    state = bench.store.state
    name = {job.id: f"{job.name}{'-again' if job.attempts == () and job.name == 'lost' else ''}" for job in state.jobs.values()}
    return {name[job.id]: (
        job.user, job.status, job.group, job.current.cause, job.pending_groups, job.after_group, name.get(job.retried_as),
        *([name.get(parent, "gone") for parent in parents] for parents in (job.after, job.after_any, job.pending_dependencies)))
        for job in state.jobs.values()}, {key: vars(group) for key, group in state.groups.items()}, [
            name[job.id] for job in nexus.list_pending(state)]


class NoLocks(dict):
    """A user's request waits for no other one of the same user."""

    def setdefault(self, *_):
        return contextlib.nullcontext()


@pytest.fixture(scope="module")
def world_of():
    """What the world is like after two deeds, the second of which comes in the midst of the first if that is large."""
    found, real = {}, nexus.encode_puts
    with Bench() as bench:
        bench.service.disk.fdatasync = lambda _: None
        bench.service.transactions.user_locks = NoLocks()
        bench.make_bearer("bob"), bench.make_bearer("ann")
        for job in JOBS:
            fields = {"command": "true", **job}
            assert send("POST", "/queue", fields, fields.pop("user", "bob"))(bench) == 200
        end("lost", "failed")(bench)
        bench.store.update(lambda state: [nexus.Put("groups", "held", nexus.Group("held", hold="it failed"))])
        base = bench.store.state

        def do(first, second, is_beside):
            bench.store.state, codes, is_pending = base, {}, [is_beside]

            def encode_puts(changes):
                text = real(changes)
                if is_pending[0] and not bench.store.committing.locked():
                    is_pending[0] = False
                    codes[second] = DEEDS[second](bench)
                return text

            nexus.encode_puts, nexus.MANY = encode_puts, -1 if is_beside else 10**6
            try:
                codes[first] = DEEDS[first](bench)
                is_pending[0] = False
                if second not in codes:
                    codes[second] = DEEDS[second](bench)
            finally:
                nexus.encode_puts, nexus.MANY = real, MANY
            assert indexes_of(bench.store.state) == indexes_of(rebuild(bench.store.state))
            return codes, describe_world(bench)

        def remember(first, second):
            if (first, second) not in found:
                found[first, second] = do(first, second, False)
            return found[first, second]

        yield do, remember


def test_a_limit_holds_for_what_is_done_beside_something_large(monkeypatch):
    """Each of two requests alone stays within it."""
    with Bench() as bench:
        bench.service.transactions.user_locks = NoLocks()
        ids, codes, real = add_all(bench, [{}] * 4), [], nexus.encode_puts

        def change(job_id, parent_id):
            codes.append(bench.ask("PATCH", f"/queue/{job_id}", {"after": [parent_id]})[0])

        def encode_puts(changes):
            monkeypatch.setattr(nexus, "encode_puts", real)
            change(*ids[2:])
            return real(changes)

        monkeypatch.setattr(nexus, "MAX_LINKS", 1)
        monkeypatch.setattr(nexus, "MANY", -1)
        monkeypatch.setattr(nexus, "encode_puts", encode_puts)
        change(*ids[:2])
        assert codes == [200, 429]


def test_large_requests_of_one_user_come_one_after_another(monkeypatch):
    """Beside each other they would meet until others wait for them."""
    with Bench() as bench:
        ids, real, together = add_all(bench, [{}] * 200), nexus.encode_puts, []
        working = set()

        def encode_puts(changes):
            if len(changes) >= 200:
                working.add(threading.get_ident())
                time.sleep(0.05)
                together.append((len(working), bench.store.committing.locked()))
                working.discard(threading.get_ident())
            return real(changes)

        def change(number):
            assert bench.ask("PATCH", "/queue", {"ids": ids, "change": {"name": f"x{number}"}})[0] == 200

        monkeypatch.setattr(nexus, "encode_puts", encode_puts)
        threads = [threading.Thread(target=change, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == [(1, False)] * 6


MANY = nexus.MANY


def rebuild(state):
    again = nexus.State()
    for job in state.jobs.values():
        again.put(nexus.Put("jobs", job.id, job))
    return again


RELIED_ON = {  # an index of State: how Touched knows of two transactions of which one changes what the other looks for there
    "ready": "no request looks", "dependents": "parents", "followers": "followed", "awaited": "groups", "lost": "groups",
    "named": "who looks for a name changes none that others look for", "awaited_names": "as named", "members": "joined",
    "queued": "adders", "queued_in": "no request looks", "prioritized": "no request looks", "ended": "no request looks",
    "ended_in": "no request looks"}


def test_touched_knows_each_index():
    """Whoever adds one says how, and adds to DEEDS what two requests may do with it."""
    assert RELIED_ON.keys() == nexus.INDEXES.keys()


@pytest.mark.parametrize("first", DEEDS)
def test_what_is_done_beside_something_large_has_an_order(first, world_of):
    """Each of two at once is as it would be before or after the other."""
    do, remember = world_of
    wrong = [second for second in DEEDS if second != first
             and do(first, second, True) not in (remember(first, second), remember(second, first))]
    assert not wrong, f"beside: {first}"


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

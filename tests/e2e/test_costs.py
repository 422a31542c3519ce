"""What one request may cost: it grows no faster than what it names and what waits, and it is bounded."""

import gc
import time

import pytest
from test_server import Bench

import nexus

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


def long_name(number):
    return f"{'abcdefghij' * 12}-{number}"


REQUESTS = [  # reason, what it finds there, (method, path, body) of what that returned
    ("a change of a job behind many layers", add_layers, lambda ids: ("PATCH", f"/queue/{ids[-1]}", {"after": ids[-40:-20]})),
    ("the end of the first of many layers", add_layers, lambda ids: ("POST", "/jobs/cancel", {"ids": ids[:1]})),
    ("the end of all layers", add_layers, lambda ids: ("POST", "/jobs/cancel", {"ids": ids})),
    ("a job after many, by names", add_named, lambda names: ("POST", "/queue", {"command": "true", "after": names})),
    ("many after one name, which many have", lambda bench, count: add_all(bench, [{"name": "x"}] * count),
     lambda ids: ("POST", "/queue", [{"command": "true", "after_any": ["x"]}] * len(ids))),
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

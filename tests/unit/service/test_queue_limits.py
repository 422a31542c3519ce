"""How many jobs of a user may wait, and after how many others."""

import pytest
from stage import Bench

import nexus


def test_links_are_bounded_in_all(monkeypatch):
    """Of what waits and what is added together, by whichever way; what has ended, or is another user's, does not count."""
    monkeypatch.setattr(nexus, "MAX_LINKS", 100)
    with Bench() as bench:
        bob = bench.make_bearer("bob")

        def add(jobs):
            return bench.ask("POST", "/queue", [{"command": "true", "gpus": 0, **job} for job in jobs])[1]["ids"]

        ids = add([{}] * 10)
        children = add([{"after_any": ids}] * 9)
        assert bench.ask("POST", "/queue", [{"command": "a", "after": ids}] * 2)[0] == 429
        assert bench.ask("PATCH", f"/queue/{children[0]}", {"after": ids})[0] == 200
        assert bench.ask("PATCH", f"/queue/{children[1]}", {"after": ids[:1]})[0] == 429
        own = bench.ask("POST", "/queue", [{"command": "a"}] * 10, bob)[1]["ids"]
        assert bench.ask("POST", "/queue", [{"command": "a", "after": own}] * 10, bob)[0] == 200
        bench.ask("POST", "/jobs/cancel", {"ids": children})
        add([{"after": ids}] * 9)
        assert bench.ask("POST", "/jobs/retry", {"ids": children})[0] == 429
        monkeypatch.setattr(nexus, "MAX_LINKS", 1)
        assert add([{}]), "what comes after nothing is refused for no link of others"


def test_a_user_fills_a_queue_of_their_own():
    """And all users but the owner cannot fill the owner's."""
    with Bench(queue_limit=3) as bench:
        tokens = {None: None}

        def ask(user, count=1):
            if user not in tokens:
                tokens[user] = bench.make_bearer(user)
            code, answer = bench.ask("POST", "/queue", [{"command": "true"}] * count, tokens[user])
            return code if code == 200 else answer["message"]

        assert ask("bob", 3) == 200 and ask("bob") == "the queue is full: 4 jobs of bob would be pending; queue_limit allows 3"
        assert [ask(f"user{number}", 3) for number in range(4)] == [200] * 4
        assert ask("ann") == f"the queue is full: 16 jobs of all users but {bench.service.user} would be pending; queue_limit allows 15"
        assert ask(None, 3) == 200 and "4 jobs of" in ask(None)


LIMITED = [  # reason, what is asked with a job of a group whose limit is 2, its limit then
    ("another", {"max_concurrent": 3}, 3), ("nothing of it", {}, 2), ("none, by a change", {"max_concurrent": None}, 0)]


@pytest.mark.parametrize("way, reason, asked, limit", [
    (way, *case) for case in LIMITED for way in ("add", "retry", "change")[case[2] == 0:]])
def test_a_group_has_the_limit_that_was_asked_for_last(bench, reason, asked, limit, way):
    job_id = bench.add(group="g", max_concurrent=2)
    if way == "change":
        assert bench.ask("PATCH", f"/queue/{job_id}", asked or {"name": "n"})[0] == 200
    elif way == "retry":
        bench.become(job_id, "failed", exit_code=1)
        assert bench.ask("POST", "/jobs/retry", {"ids": [job_id], "change": asked})[0] == 200
    else:
        bench.add(group="g", **asked)
    assert bench.store.state.groups["g"].limit == limit

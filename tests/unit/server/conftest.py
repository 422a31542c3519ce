"""Stages of the server, for each test or for a file."""

import time

import pytest
from stage import ANN, BOB, Bench, Listening

import nexus


@pytest.fixture
def listening():
    with Listening() as made:
        yield made


@pytest.fixture(scope="module")
def shared_bench():
    with Bench() as made:
        for job_id in ("abc", "run", "end"):
            made.add(id=job_id)
        made.become("run", "running", pid=1)
        made.become("end", "completed", exit_code=0)
        yield made


@pytest.fixture
def lab_bench():
    """A Bench that bob and ann may call, each with a token, and each with a job: bob's, then ann's, then the owner's."""
    with Bench() as bench:
        for user in ("bob", "ann"):
            nexus.change_tokens(nexus.DISK, bench.layout.tokens_file, lambda tokens, user=user: nexus.add_token(
                tokens, user, f"secret-of-{user}", None, time.time()))
        bench.ids = [bench.ask("POST", "/queue", {"command": f"echo {word}", "name": word}, headers)[1]["id"]
                     for word, headers in (("bobs", BOB), ("anns", ANN), ("own", {}))]
        yield bench

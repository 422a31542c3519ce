"""A queue in which something can be chosen."""

import pytest


@pytest.fixture
def lab(bench):
    """`abc` to `abe` wait, one runs, one has ended, one has failed; `bob` has one that waits."""
    for id, fields in (("abc", {"name": "n"}), ("abd", {"group": "g"}), ("abe", {}), ("run", {}), ("end", {}), ("fai", {})):
        bench.add(id=id, **fields)
    bench.become("run", "running", pid=1)
    bench.become("end", "completed", exit_code=0)
    bench.become("fai", "failed", exit_code=1, cause="exit")
    bench.bob = bench.make_bearer("bob")
    bench.service.clock.new_job_id = lambda *_: "bob"
    bench.ask("POST", "/queue", {"command": "bobs", "name": "b", "group": "h"}, bench.bob)
    vars(bench.service.clock).pop("new_job_id")
    return bench

"""What somebody sees who shares a machine with another user's nexus: who is next, and when.  Real users, services and a browser."""

import contextlib
import datetime
import json
import re
import time

import live
import pytest
from pages import visit
from playwright.sync_api import expect

QUEUED = 40


@pytest.fixture(scope="module")
def two():
    """ann's service, here root's, and bob's, with the same GPU."""
    with contextlib.ExitStack() as stack:
        tools = live.Tools()
        stack.callback(tools.close)
        user = live.User(tools)
        stack.callback(user.remove)
        options = {"gpus": [{}], "lease_dir": str(tools.folder / "shared" / "leases")}
        ann, bob = stack.enter_context(live.Box(**options)), stack.enter_context(live.Box(user=user, **options))
        bob.wait(bob.add("sleep 1"), "completed")       # so it is known how long his jobs run
        yield ann, bob


@pytest.fixture
def waiting(two):
    """(ann, bob, ann's job): bob's queue is full, and his first job runs until `end` is there."""
    ann, bob = two
    end = bob.user.folder / "open" / "end"
    end.unlink(missing_ok=True)
    command = f"until [ -e {end} ]; do sleep 0.1; done"
    bob.wait(bob.add(command), "running")
    bob.ask("POST", "/queue", [{"command": f"{command} # {number}"} for number in range(QUEUED)])
    job_id = ann.add("true")
    live.until(lambda: (told := ann.status())["next_turn"] and told["next_turn"]["user"] == told["user"] and bob.status()["others"],
               "each to see the other, and ann's want to count")
    yield ann, bob, job_id
    bob.ask("POST", "/jobs/cancel", {"status": "pending"})
    end.touch()
    ann.wait(job_id, "completed")
    live.until(lambda: not bob.ask("GET", "/jobs?status=running"), "the end of bob's jobs")
    live.until(lambda: not ann.status()["others"] and not bob.status()["others"], "nobody to wait any more")
    assert "Other users" not in ann.nexus().stdout and ann.status()["next_turn"] is None


def test_ann_knows_who_is_next_and_when(waiting):
    ann, bob, job_id = waiting
    name = bob.user.name
    told = ann.nexus().stdout
    assert re.search(rf"\n{name}: 1 running, {QUEUED} waiting since \d\d:\d\d\nNext GPU: yours, (in about|at any)", told), told
    assert f"Others: {name}: 1 running, {QUEUED} waiting since" in ann.nexus("top").stdout
    why = ann.nexus("why", job_id).stdout
    reason = f"GPU 0 is held by the nexus of {name}; {name} has {QUEUED} waiting; the next GPU is for your first job"
    assert f"waits: {reason}\n" in why and re.search("it will start (in about|at any)", why), why
    row, = json.loads(ann.nexus("queue", "--json").stdout)
    assert row["waiting_for"] == reason
    assert 0 <= datetime.datetime.fromisoformat(row["estimated_start"].replace("Z", "+00:00")).timestamp() - time.time() + 1 < 90
    status = ann.status()
    assert status["others"][0].items() >= {"user": name, "running": 1, "waiting": QUEUED, "gpus": 1.0, "collects": None}.items()
    assert status["next_turn"]["user"] == status["user"] and 0 < status["next_turn"]["seconds"] < 90
    his = bob.nexus().stdout
    assert f"\n{status['user']}: 0 running, 1 waiting since" in his and f"\nNext GPU: {status['user']}, " in his, his
    assert f"the next turn is {status['user']}'s" in bob.nexus("queue").stdout


def test_the_page_says_the_same(browser, waiting):
    ann, bob, _ = waiting
    for width in (1600, 390):
        with visit(browser, ann, width=width) as page:
            sharing = page.locator("#sharing")
            expect(sharing.get_by_role("listitem")).to_have_text(
                re.compile(rf"^{bob.user.name} 1 running · {QUEUED} waiting for \d+m$"))
            expect(sharing).to_contain_text("Next GPU: yours")
            expect(page.locator("#overview")).to_contain_text("the next GPU is for your first job")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if shots := live.os.environ.get("SHOTS"):
                page.screenshot(path=f"{shots}/sharing-{width}.png", full_page=True)

"""What a request changes: others wait for it only where it is small, and the loop looks at it at once."""

import pytest

import nexus

CHANGES = [  # method, path, body
    ("POST", "/queue", {"command": "true"}), ("POST", "/jobs/retry", {"ids": ["fai"]}), ("PATCH", "/queue/abc", {"name": "m"}),
    ("POST", "/jobs/cancel", {"ids": ["abc"]}), ("POST", "/jobs/cancel", {"ids": ["run"]}), ("POST", "/service/pause", None),
    ("POST", "/service/resume", None), ("POST", "/gpus/0/pause", None),
]


@pytest.mark.parametrize("request_", CHANGES, ids=[f"{path} {body}" for _, path, body in CHANGES])
def test_what_changes_the_queue_wakes_the_loop(lab, request_):
    woken = []
    lab.service.wake = lambda: woken.append(lab.store.state.seq)
    before = lab.store.state.seq
    assert lab.ask(*request_)[0] < 300
    assert woken and woken[-1] == lab.store.state.seq > before, "when it is done"


LARGE = [  # reason, (method, path, body); whether others need not wait for it, where MANY is 3
    ("three jobs", ("POST", "/queue", {"commands": ["a", "b", "c"]}), False),
    ("four jobs", ("POST", "/queue", {"commands": ["a"] * 4}), True),
    ("a job after two", ("POST", "/queue", {"command": "a", "after": ["abc", "abd"]}), False),
    ("a job after three", ("POST", "/queue", {"command": "a", "after": ["abc", "abd"], "after_any": ["run"]}), True),
    ("one after which nothing comes", ("POST", "/jobs/cancel", {"ids": ["abe"]}), False),
    ("one after which another comes", ("POST", "/jobs/cancel", {"ids": ["abc"]}), True),
    ("one of a group after which another comes", ("POST", "/jobs/cancel", {"ids": ["abd"]}), True),
]


@pytest.mark.parametrize("reason, request_, is_large", LARGE, ids=[case[0] for case in LARGE])
def test_what_is_large_is_made_beside_others(lab, monkeypatch, reason, request_, is_large):
    if request_[1] == "/jobs/cancel":
        lab.add(after=["abc"], after_group=["g"])
    monkeypatch.setattr(nexus, "MANY", 3)
    made, update = [], lab.store.update_large
    monkeypatch.setattr(lab.store, "update_large", lambda change: made.append(1) or update(change))
    assert lab.ask(*request_)[0] < 300 and bool(made) == is_large

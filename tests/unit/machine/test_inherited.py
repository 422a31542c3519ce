"""What a service inherits."""

import errno
import os

import nexus


def test_a_c_library_that_tells_no_scheduling_class(monkeypatch):
    """As musl: a service starts all the same."""
    def refuse(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    assert "SCHED" not in nexus.describe_inherited()

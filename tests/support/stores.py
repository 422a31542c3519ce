"""A Store in a folder that may crash, and what tests of it share.

    box = Box(folder).open().add("abc")
    later = box.crash(other_folder).open()              # what the disk holds at this moment
    assert later.dump() == box.dump() and later.said == []
"""

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import weakref
from unittest import mock

from makers import config, indexes_of, job

import nexus


class Box:
    """A folder with a state in it, and the Store that has it."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.layout, self.disk = nexus.make_layout(self.folder, config()), nexus.Disk()
        self.said = []

    def open(self, **facts):
        log = logging.Logger("test")
        log.addHandler(type("Keep", (logging.Handler,), {"emit": lambda _, record: self.said.append(record.getMessage())})())
        self.store = nexus.Store(self.layout, nexus.Clock(), self.disk, log)
        weakref.finalize(self.store, self.store.journal.close)         # a service ends with its process, a test does not
        for name, fact in facts.items():
            setattr(self.store, name, fact)
        self.store.recover()
        return self

    def update(self, *changes, answer=None):
        return self.store.update(lambda state: made_by(state, changes, answer))

    def add(self, *ids, **fields):
        for job_id in ids:
            self.update(*nexus.add_job(job(job_id, number=self.store.state.next_number, **fields)))
        return self

    def read_edit(self):
        """What another program has made of `paused` and `paused_gpus`; None when it has not written state.json, or only half of it."""
        found = []
        return found[0] if self.store.look_for_edit(found.append) else None

    def dump(self):
        return dump(self.store.state)

    def path(self, name):
        return os.path.join(self.folder, name)

    def names(self):
        return sorted(os.listdir(self.folder))

    def crash(self, folder):
        """What the disk holds at this moment, in another folder; the Store of this one goes no further."""
        shutil.copytree(self.folder, folder)
        if self.is_one_file():
            os.unlink(f"{folder}/state.json.prev")
            os.link(f"{folder}/state.json", f"{folder}/state.json.prev")
        return Box(folder)

    def is_one_file(self):
        return nexus.is_same_file(self.disk, self.path("state.json"), self.path("state.json.prev"))

    def cut(self, name):
        """Damage a file in its place."""
        with open(self.path(name), "r+b") as file:
            file.truncate(os.path.getsize(self.path(name)) // 2)


def made_by(state, changes, answer=None):
    """Changes, or what makes one of the State as it is by then."""
    for change in changes:
        yield change(state) if callable(change) else change
    return answer


def dump(state):
    """All of a State but what no job needs, and how many changes that took; `indexes` as they are."""
    used = {one.environment for one in state.jobs.values()}
    facts = nexus.FACTS.keys() - {"host", "service_id", "damage"}           # of whoever writes, and of the last start
    return {"facts": {name: getattr(state, name) for name in facts}, "jobs": dict(state.jobs),
            "environments": {digest: dict(variables) for digest, variables in state.environments.items() if digest in used},
            "groups": {name: group for name, group in state.groups.items() if name in {one.group for one in state.jobs.values()}},
            "seen": dict(state.seen), "nodes": dict(state.nodes), "usage": dict(state.usage),
            "indexes": indexes_of(state)}


def set_status(job_id, status, **facts):
    """What a test knows of the job's attempt is its only one's."""
    return lambda state: nexus.change_job(state.jobs[job_id], status=status, attempts=(nexus.Attempt(1, **facts),))


def set_fact(name, fact):
    return nexus.Put("facts", name, fact)


@contextlib.contextmanager
def quick_disk():
    """Syncs that take no time: what is on this disk survives the tests' crashes, which are not the machine's."""
    with mock.patch.multiple(nexus.Disk, fsync=lambda *_: None, fdatasync=lambda *_: None):
        yield


@contextlib.contextmanager
def new_folder():
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def live_on(box, folder):
    """More changes, another crash, and another; with snapshots and without."""
    for number, job_id in enumerate(["aaa", "bbb", "ccc"]):
        box.add(job_id)
        box.update(set_fact("paused", bool(number % 2)))
        if number:
            box.store.save_checkpoint()
        box.update(set_status(job_id, nexus.RUNNING))
        before = box.dump()
        box = box.crash(f"{folder}/again-{number}").open()
        assert box.said == [], "nothing is damaged any more"
        assert box.dump() == before
        if number:
            other = box.crash(f"{folder}/other-{number}")
            os.unlink(other.path("state.json"))
            assert other.open().dump() == before, "and it could be done from state.json.prev"


class Moments:
    """Calls `look` before and after every call that changes the disk."""
    CALLS = ("replace", "link", "unlink", "fsync", "fdatasync", "pwrite", "ftruncate", "open")

    def __init__(self, look):
        self.look, self.is_looking = look, False

    def __enter__(self):
        self.patches = [mock.patch.object(os, name, self.wrap(getattr(os, name))) for name in self.CALLS]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()

    def wrap(self, real):
        def call(*arguments, **options):
            self.notice()
            try:
                return real(*arguments, **options)
            finally:
                self.notice()
        return call

    def notice(self):
        if not self.is_looking:
            self.is_looking = True
            try:
                self.look()
            finally:
                self.is_looking = False


def failing(number=errno.ENOSPC):
    def refuse(*_):
        raise OSError(number, os.strerror(number))
    return refuse

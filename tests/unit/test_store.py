"""Section 12: what is acknowledged is on the disk, whatever happens to it."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, config, indexes_of, job, json_values, paths_of, put, put_at

import nexus

IDS = [f"a{b}{c}" for b in "xyz" for c in "KL"]


class Box:
    """A folder with a state in it, and the Store that has it."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.layout = nexus.make_layout(self.folder, config())
        self.said = []

    def open(self, **facts):
        log = logging.Logger("test")
        log.addHandler(type("Keep", (logging.Handler,), {"emit": lambda _, record: self.said.append(record.getMessage())})())
        self.store = nexus.Store(self.layout, nexus.Clock(), log)
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
        return Box(folder)


def made_by(state, changes, answer=None):
    """Changes, or what makes one of the State as it is by then."""
    for change in changes:
        yield change(state) if callable(change) else change
    return answer


def dump(state):
    """All of a State but what no job needs, and how many changes that took; `indexes` as they are."""
    used = {one.environment for one in state.jobs.values()}
    facts = nexus.FACTS.keys() - {"host", "service_id"}           # of whoever writes
    return {"facts": {name: getattr(state, name) for name in facts}, "jobs": dict(state.jobs),
            "environments": {digest: dict(variables) for digest, variables in state.environments.items() if digest in used},
            "groups": {name: group for name, group in state.groups.items() if name in {one.group for one in state.jobs.values()}},
            "seen": dict(state.seen), "nodes": dict(state.nodes),
            "indexes": indexes_of(state)}


def set_status(job_id, status, **facts):
    """What a test knows of the job's attempt is its only one's."""
    return lambda state: nexus.change_job(state.jobs[job_id], status=status, attempts=(nexus.Attempt(1, **facts),))


def add(*arguments, **fields):
    return nexus.Put("jobs", arguments[0], job(*arguments, **fields))


def set_fact(name, fact):
    return nexus.Put("facts", name, fact)


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path / "home").open()


# Changing and reading


FAULTS = [  # reason, what the decision does
    ("it refuses", lambda state: nexus.refuse("no")),
    ("a fault of the code", lambda state: 1 / 0),
    ("a change that cannot be written", lambda state: nexus.change_job(state.jobs["abc"], name={1, 2})),
    ("an interrupt", lambda state: (_ for _ in ()).throw(KeyboardInterrupt)),
]


@pytest.mark.parametrize("reason, act", FAULTS, ids=[case[0] for case in FAULTS])
def test_a_decision_that_fails_changes_nothing(box, tmp_path, reason, act):
    box.add("abc")
    before, version = box.dump(), box.store.version

    def decide(state):
        yield add("xyz", 2, key="k")
        yield set_status("abc", nexus.RUNNING)(state)
        yield set_fact("paused", True)
        made = act(state)
        if isinstance(made, nexus.Put):
            yield made
        else:
            next(made)

    with pytest.raises(BaseException) as caught:
        box.store.update(decide)
    assert not isinstance(caught.value, AssertionError)
    assert box.dump() == before and box.store.version == version
    assert box.crash(tmp_path / "copy").open().dump() == before
    box.add("xyz")
    assert box.crash(tmp_path / "copy2").open().dump() == box.dump()


def test_who_only_looks_costs_no_sync(box, monkeypatch):
    monkeypatch.setattr(os, "fdatasync", lambda _: pytest.fail("synced"))
    assert box.update(answer=5) == 5


def test_many_threads_lose_nothing(box, tmp_path):
    def work(number):
        for step in range(20):
            box.update(set_fact("paused_gpus", (f"{number}-{step}",)))
            if step % 7 == number:
                box.store.save_checkpoint()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert box.store.state.seq == 160
    assert box.crash(tmp_path / "copy").open().dump() == box.dump()


@contextlib.contextmanager
def quick_disk():
    """Syncs that take no time: what is on this disk survives the tests' crashes, which are not the machine's."""
    with mock.patch.object(os, "fsync", lambda _: None), mock.patch.object(os, "fdatasync", lambda _: None):
        yield


@contextlib.contextmanager
def new_folder():
    folder = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# Recovery: a history with two snapshots, then a crash


def make_history(folder):
    """A Store with state.json at 5, state.json.prev at 3, and changes to 8 in journal.jsonl."""
    box = Box(folder).open()
    box.update(nexus.Put("environments", "e" * 8, {"A": "b\udcff"}))
    box.add("abc", "xyz")
    box.store.save_checkpoint()
    box.update(set_status("abc", nexus.RUNNING))
    box.update(set_fact("paused", True))
    box.store.save_checkpoint()
    box.add("uvw")
    box.update(set_status("abc", nexus.COMPLETED, finished_at=NOW))
    box.update(nexus.Put("jobs", "xyz", None))
    assert box.store.state.seq == 8
    assert [name for name in box.names() if "journal" in name] == ["journal.jsonl", "journal.jsonl.prev"]
    return box


def rewrite(name, change):
    """Damage: the content of a file, changed."""
    def act(box):
        with open(box.path(name), "rb") as file:
            content = file.read()
        with open(box.path(name), "wb") as file:
            file.write(change(content))
    return act


def remove(*names):
    def act(box):
        for name in names:
            os.unlink(box.path(name))
    return act


def both(*acts):
    def act(box):
        for one in acts:
            one(box)
    return act


def lay_out_anew(name):
    def act(box):
        done = subprocess.run([sys.executable, "-m", "json.tool", box.path(name)], capture_output=True, check=True)
        with open(box.path(name), "wb") as file:
            file.write(done.stdout)
    return act


def change_line(number, new):
    def change(content):
        lines = content.splitlines(keepends=True)
        lines[number] = new
        return b"".join(lines)
    return change


def copy(name, other, part=1.0):
    def act(box):
        with open(box.path(name), "rb") as file:
            content = file.read()
        with open(box.path(other), "wb") as file:
            file.write(content[:int(len(content) * part)])
    return act


def join_journals(box):
    content = b"".join(pathlib.Path(box.path(name)).read_bytes() for name in ("journal.jsonl.prev", "journal.jsonl"))
    pathlib.Path(box.path("journal.jsonl")).write_bytes(content)
    os.unlink(box.path("journal.jsonl.prev"))


GARBAGE = bytes(range(256)) * 8
HARMLESS = [  # reason, what happens to the files: nothing of what was acknowledged is lost
    ("a crash", both()),
    ("a write cut short", rewrite("journal.jsonl", lambda content: content + b'{"seq": 9, "state": {"pau')),
    ("a write that lacks its last byte", rewrite("journal.jsonl", lambda content: content + nexus.encode_transaction(
        9, [set_fact("paused", False)]).encode()[:-1])),
    ("a line too many", rewrite("journal.jsonl", lambda content: content.replace(b"\n", b"\ngarbage\n", 1))),
    ("NUL bytes at the end, as a crash of the machine leaves them", rewrite("journal.jsonl", lambda content: content + b"\0" * 4096)),
    ("state.json cut short", rewrite("state.json", lambda content: content[:len(content) // 2])),
    ("state.json is garbage", rewrite("state.json", lambda content: GARBAGE)),
    ("state.json of no version", rewrite("state.json", lambda content: content.replace(b'"version": 2', b'"version": "x"'))),
    ("state.json with an unknown field", rewrite("state.json", lambda content: content.replace(b'"xyz": {', b'"xyz": {"colour":[1],'))),
    ("a change with an unknown field", rewrite("journal.jsonl", lambda content: content.replace(b'"abc":{', b'"abc":{"colour":1,'))),
    ("state.json with a job that is none", rewrite(
        "state.json", lambda content: content.replace(b'"status":"running"', b'"status":"walking"'))),
    ("state.json deleted", remove("state.json")),
    ("state.json.prev deleted", remove("state.json.prev")),
    ("state.json.prev is garbage", rewrite("state.json.prev", lambda content: GARBAGE)),
    ("state.json laid out by another program", lay_out_anew("state.json")),
    ("what is before state.json is missing", remove("journal.jsonl.prev")),
    ("an older state.json was put back", copy("state.json.prev", "state.json")),
    ("a crash while the next snapshot was written", copy("state.json", "state.json.new", 0.5)),
    ("a crash after .prev was made", both(copy("state.json", "state.json.prev"), copy("state.json", "state.json.new"))),
    ("a crash between the two renames", both(copy("state.json", "state.json.prev"), remove("state.json"))),
    ("a crash between the renames of the journals", both(join_journals, copy("journal.jsonl", "journal.jsonl.prev"))),
    ("a crash before the journal began anew", join_journals),
    ("files of other programs", lambda box: pathlib.Path(box.path("state.json~")).touch()),
]


def test_the_previous_file_leaves_nothing_aside(tmp_path):
    """Also when it is the same file already: then rename(2) does nothing."""
    (tmp_path / "state.json").touch()
    for _ in range(2):
        nexus.keep_previous(str(tmp_path / "state.json"))
    assert sorted(os.listdir(tmp_path)) == ["state.json", "state.json.prev"]


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return make_history(tmp_path_factory.mktemp("history") / "home")


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


@pytest.mark.parametrize("reason, act", HARMLESS, ids=[case[0] for case in HARMLESS])
def test_recovery_brings_back_what_was_acknowledged(history, tmp_path, reason, act):
    box = history.crash(tmp_path / "copy")
    act(box)
    content = {name: pathlib.Path(box.path(name)).read_bytes() for name in box.names()}
    box.open()
    assert box.dump() == history.dump()
    is_broken = "is broken" in " ".join(box.said)
    asides = [name for name in box.names() if ".broken-" in name]
    assert is_broken == bool(asides)
    for name in asides:
        assert pathlib.Path(box.path(name)).read_bytes() == content[name.partition(".broken-")[0]], "kept for a person to look at"
    for name in ("state.json", "state.json.prev"):
        if os.path.exists(box.path(name)) and not (name.endswith("prev") and "state.json.prev is garbage" in reason):
            with open(box.path(name), "rb") as file:
                nexus.read_state(file.read().decode())
    live_on(box, tmp_path)


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("reason, act", HARMLESS, ids=[case[0] for case in HARMLESS])
def test_recovery_on_a_full_disk(history, tmp_path, monkeypatch, reason, act, name):
    """All is there to be read; nothing is changed before what was recovered is on the disk again."""
    box = history.crash(tmp_path / "copy")
    act(box)
    monkeypatch.setattr(os, name, failing())
    box.open()
    assert box.dump() == history.dump()
    if not box.store.unsettled:
        return                                          # there was nothing to write
    for act in (lambda: box.add("xyz"), box.store.settle):
        with pytest.raises(nexus.NexusError) as caught:
            act()
        assert caught.value.kind == "unavailable" and "No space left" in caught.value.message
    monkeypatch.undo()
    assert box.crash(tmp_path / "other").open().dump() == history.dump(), "killed, it could be read again"
    with pytest.raises(nexus.NexusError):
        box.add("xyz")
    box.store.settle()
    assert box.dump() == history.dump()
    box.add("xyz")
    live_on(box, tmp_path)


DAMAGE = [  # reason, what happens, what is known to be missing
    ("a line in the middle is garbage", rewrite("journal.jsonl", change_line(1, b"garbage\n")), "after change 6 comes change 8"),
    ("a change of no table", rewrite("journal.jsonl", lambda content: content.replace(b'"jobs":{"abc":{', b'"jubs":{"abc":{')),
     "change 7: jubs abc cannot be understood"),
    ("the last lines are garbage", both(rewrite("journal.jsonl", change_line(1, b"x\n")),
                                        rewrite("journal.jsonl", change_line(2, b"y\n"))),
     "its last 2 lines cannot be read"),
    ("both state files are gone", remove("state.json", "state.json.prev"), "after change 0 comes change 4"),
    ("the journal is gone", remove("journal.jsonl"), "journal.jsonl is missing"),
    ("both are garbage, and the journals empty", both(*(rewrite(name, lambda _: b"") for name in (
        "state.json", "state.json.prev", "journal.jsonl", "journal.jsonl.prev"))), "cannot be read: their jobs are lost"),
]


@pytest.mark.parametrize("reason, act, words", DAMAGE, ids=[case[0] for case in DAMAGE])
def test_damage_is_told_and_the_rest_is_brought_back(history, tmp_path, reason, act, words):
    box = history.crash(tmp_path / "copy")
    act(box)
    box.open()
    assert words in " ".join(box.said), box.said
    kept, = box.store.list_damaged()
    assert ("garbage" in pathlib.Path(kept).read_text()) == ("is garbage" in reason)
    live_on(box, tmp_path)


def damage_job(old, new):
    """Of the one state file that there is, as after a downgrade: whatever cannot be understood is in both."""
    return both(remove("state.json.prev", "journal.jsonl.prev"), rewrite("state.json", lambda content: content.replace(old, new, 1)))


LOST = [  # reason, what happens, words of what is told, jobs that are left
    ("a field of another type", damage_job(b'"xyz": {', b'"xyz": {"retries":"2",'),
     "job xyz cannot be understood: retries is '2', and not int", {"abc", "uvw"}),
    ("no id", damage_job(b'"xyz": {', b'"/etc": {'), "job /etc cannot be understood: its id is xyz", {"abc", "uvw"}),
    ("a fact", damage_job(b'"paused": true', b'"paused": "no"'), "facts paused cannot be understood: paused is 'no', and not bool",
     {"abc", "uvw"}),
    ("a change of a job", rewrite("journal.jsonl", lambda content: content.replace(b'"status":"completed"', b'"status":7')),
     "change 7: job abc cannot be understood: status is 7, and not str", {"uvw"}),
    ("the number of a change", rewrite("journal.jsonl", lambda content: content.replace(b'"seq":6', b'"seq":99')),
     "after change 5 comes change 99", {"abc", "uvw"}),
]


@pytest.mark.parametrize("reason, act, words, left", LOST, ids=[case[0] for case in LOST])
def test_what_cannot_be_understood_costs_its_job_alone_and_is_kept(history, tmp_path, reason, act, words, left):
    box = history.crash(tmp_path / "copy")
    act(box)
    box.open()
    assert set(box.store.state.jobs) == left and any(words in said for said in box.said), box.said
    assert not any(job != history.store.state.jobs[job.id] for job in box.store.state.jobs.values())
    kept, = box.store.list_damaged()
    assert kept in box.said[-1] and os.stat(kept).st_mode & 0o777 == 0o600
    assert any(words in one["words"] for one in map(json.loads, pathlib.Path(kept).read_text().splitlines()))
    live_on(box, tmp_path)


@given(st.data())
def test_whatever_stands_in_the_place_of_a_field_no_other_job_is_lost(history, data):
    name = data.draw(st.sampled_from(["state.json", "state.json.prev", "journal.jsonl.prev", "journal.jsonl", "all there is"]))
    new = data.draw(json_values | st.integers(-1, 9))
    with quick_disk(), new_folder() as folder:
        box = history.crash(f"{folder}/copy")
        if name == "all there is":
            remove("state.json.prev", "journal.jsonl.prev")(box)
        path = pathlib.Path(box.path("state.json" if name == "all there is" else name))
        if name.startswith("journal"):
            bodies = [json.loads(line) for line in path.read_text().splitlines()]
            at = data.draw(st.integers(0, len(bodies) - 1))
            where = data.draw(st.sampled_from([one for one in paths_of(bodies[at]) if one]))
            own = set(bodies[at]["put"].get("jobs", {}))
            bodies[at] = put_at(bodies[at], where, new)
            path.write_text("".join(nexus.encode_json(body) + "\n" for body in bodies))
        else:
            body = json.loads(path.read_text())
            needed = ["version", "seq", "host"] if name == "all there is" else ["version"]
            where = data.draw(st.sampled_from([one for one in paths_of(body) if one and one != ("jobs",) and one[0] not in needed]))
            own = {where[1]} if where[0] == "jobs" else set()
            path.write_text(json.dumps(put_at(body, where, new)))
        try:
            box.open()
        except nexus.NexusError as error:
            assert "runs on" in error.message and where == ("host",), "another machine's, as it seems"
            return
        jobs, wanted = box.store.state.jobs, {one: job for one, job in history.store.state.jobs.items() if one not in own}
        assert not wanted.keys() - jobs.keys()
        if name != "journal.jsonl":
            assert {one: jobs[one] for one in wanted} == wanted
        box.add("zzz")
        assert box.crash(f"{folder}/again").open().dump() == box.dump()


def test_a_folder_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(nexus.NexusError) as caught:
        Box(tmp_path / "file" / "home").open()
    assert caught.value.kind == "unavailable"
    box = Box(tmp_path / "home").open()
    os.unlink(box.path("state.json"))
    os.mkdir(box.path("state.json"))
    with pytest.raises(nexus.NexusError) as caught:
        Box(tmp_path / "home").open()
    assert caught.value.kind == "unavailable", "what cannot be read is not empty"


def test_an_empty_folder_is_an_empty_state(tmp_path):
    box = Box(tmp_path / "home").open()
    assert box.store.state.seq == 0 and box.said == []
    assert box.names() == ["journal.jsonl", "journal.jsonl.prev", "state.json", "state.json.prev"]
    again = box.crash(tmp_path / "copy").open()
    assert again.store.service_id == box.store.service_id, "the leases are this service's"
    assert os.stat(box.path("state.json")).st_mode & 0o777 == os.stat(box.path("journal.jsonl")).st_mode & 0o777 == 0o600


# Every moment at which it may be killed


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


BREAKS = [  # reason, the file that is cut short besides
    ("killed", None), ("killed, and state.json is lost", "state.json"), ("killed, and state.json.prev is lost", "state.json.prev"),
]


def test_killed_at_any_moment_it_has_what_was_acknowledged():
    with quick_disk(), new_folder() as folder:
        box = Box(f"{folder}/home").open()
        moments = []                # (folder, allowed states)
        acknowledged = [box.dump()]
        wanted = []

        def look():
            place = f"{folder}/{len(moments)}"
            shutil.copytree(box.folder, place)
            moments.append((place, [acknowledged[-1], *wanted]))

        def do(*changes):
            """An update, of which each part may be on the disk before it is acknowledged."""
            shadow = nexus.State()
            now = box.store.state
            put(shadow, *(nexus.Put("facts", name, getattr(now, name)) for name in nexus.FACTS), *(
                nexus.Put(table, key, row) for table in nexus.ROWS for key, row in getattr(now, table).items()))
            put(shadow, *made_by(shadow, changes))
            wanted[:] = [dump(shadow)]
            box.update(*changes)
            acknowledged.append(box.dump())
            wanted[:] = []

        with Moments(look):
            for number, job_id in enumerate(IDS):
                do(nexus.Put("environments", f"env{number}", {"N": str(number)}),
                   *nexus.add_job(job(job_id, number + 1, environment=f"env{number}")))
                if number % 2:
                    box.store.save_checkpoint()
                do(set_status(job_id, nexus.RUNNING))
                if number > 3:
                    do(set_status(IDS[number - 3], nexus.COMPLETED))
                    do(nexus.Put("jobs", IDS[number - 3], None))
        assert len(moments) > 100
        for place, allowed in moments:
            for reason, broken in BREAKS:
                if broken and not os.path.exists(os.path.join(place, broken)):
                    continue
                copy = Box(f"{place}-{broken}")
                shutil.copytree(place, copy.folder)
                if broken:
                    with open(copy.path(broken), "r+b") as file:
                        file.truncate(os.path.getsize(copy.path(broken)) // 2)
                copy.open()
                assert copy.dump() in allowed, f"{reason} at {place}: {os.listdir(place)}"
                assert not [said for said in copy.said if "missing" in said or "after change" in said]
                shutil.rmtree(copy.folder)


# The disk refuses


def failing(number=errno.ENOSPC):
    def refuse(*_):
        raise OSError(number, os.strerror(number))
    return refuse


REFUSALS = [  # reason, calls of the system that fail
    ("no room", ["pwrite"]), ("the sync fails", ["fdatasync"]), ("the sync fails, and what was written stays", ["fdatasync", "ftruncate"]),
    ("a write is cut short and stays", ["half", "ftruncate"]), ("it cannot be opened again", ["fdatasync", "open"]),
]


@pytest.mark.parametrize("reason, names", REFUSALS, ids=[case[0] for case in REFUSALS])
def test_what_the_disk_refuses_has_not_happened(box, tmp_path, monkeypatch, reason, names):
    box.add("abc")
    before, version = box.dump(), box.store.version
    real_pwrite = os.pwrite

    def write_half(handle, data, offset):
        if len(data) < 100:
            failing()()
        return real_pwrite(handle, data[:50], offset)

    for name in names:
        monkeypatch.setattr(os, "pwrite" if name == "half" else name, write_half if name == "half" else failing())
    for _ in range(2):
        with pytest.raises(nexus.NexusError) as caught:
            box.add("xyz")
        assert caught.value.kind == "unavailable" and "journal" in caught.value.message and "room" in caught.value.hint
        assert box.store.last_error is caught.value
    assert box.dump() == before and box.store.version == version
    assert len(box.said) == 1, "said once"
    monkeypatch.undo()
    box.add("uvw")
    assert box.store.last_error is None and "can be written again" in box.said[-1]
    box.update(set_status("uvw", nexus.RUNNING))
    again = box.crash(tmp_path / "copy").open()
    assert again.dump() == box.dump() and set(again.store.state.jobs) == {"abc", "uvw"} and again.said == []
    live_on(again, tmp_path)


SNAPSHOT_REFUSALS = ["fsync", "replace", "open", "link"]


@pytest.mark.parametrize("name", SNAPSHOT_REFUSALS)
def test_a_snapshot_that_fails_leaves_all_as_it_was(box, tmp_path, monkeypatch, name):
    box.add("abc")
    box.store.save_checkpoint()
    box.add("xyz")
    box.store.save_checkpoint()
    box.add("uvw")
    before = box.store.checkpoint_seq
    monkeypatch.setattr(os, name, failing())
    with contextlib.suppress(OSError):
        box.store.save_checkpoint()
        assert name == "link", "a file system may have none"
    monkeypatch.undo()
    assert box.store.checkpoint_seq == before or name == "link"
    assert box.crash(tmp_path / "copy").open().dump() == box.dump()
    box.add("rst")
    box.store.save_checkpoint()
    assert box.store.checkpoint_seq == box.store.state.seq
    again = box.crash(tmp_path / "copy2").open()
    assert again.dump() == box.dump() and again.said == []
    live_on(again, tmp_path)


def test_an_edit_of_an_edit(box):
    """The second comes before the service has written its own: what it takes back differs from the first alone."""
    box.store.save_checkpoint()
    path = pathlib.Path(box.path("state.json"))
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "paused": True}))
    with pytest.raises(OSError):                # it could not be taken over: it is told again
        box.store.look_for_edit(failing())
    assert box.read_edit() == {"paused": True}
    path.write_text(json.dumps({**body, "paused": False, "paused_gpus": [0]}))
    assert box.read_edit() == {"paused": False, "paused_gpus": (0,)}


def test_an_edit_just_as_state_json_is_written(box, monkeypatch):
    box.add("abc")
    path, rename = pathlib.Path(box.path("state.json")), os.replace

    def replace(source, target):
        rename(source, target)
        if target == str(path):
            path.write_text(json.dumps({**json.loads(path.read_text()), "paused": True}))

    monkeypatch.setattr(os, "replace", replace)
    box.store.save_checkpoint()
    monkeypatch.undo()
    assert box.read_edit() == {"paused": True}


def test_a_state_file_that_somebody_breaks_does_not_become_prev(box, tmp_path):
    box.add("abc")
    box.store.save_checkpoint()
    box.add("xyz")
    box.store.save_checkpoint()
    with open(box.path("state.json"), "r+") as file:
        file.truncate(100)
    box.add("uvw")
    box.store.save_checkpoint()
    assert box.store.checkpoint_wanted.is_set(), "it may be an edit, half written: that is looked at first"
    assert box.read_edit() is None
    box.store.save_checkpoint()
    assert os.path.getsize(box.path("state.json")) == 100, "it may still be being written"
    assert [box.read_edit() for _ in range(2)] == [None, {}]
    box.store.save_checkpoint()
    again = box.crash(tmp_path / "copy")
    assert again.open().dump() == box.dump() and again.said == []
    other = box.crash(tmp_path / "other")
    os.unlink(other.path("state.json"))
    assert other.open().dump() == box.dump() and other.said == []


def test_a_snapshot_is_wanted_when_the_journal_has_grown(box):
    box.add("abc")
    assert not box.store.checkpoint_wanted.is_set()
    for number in range(40):
        box.update(lambda state, number=number: nexus.change_job(state.jobs["abc"], command=str(number) + "x" * 8000))
    assert box.store.checkpoint_wanted.is_set()
    box.store.save_checkpoint()
    box.store.checkpoint_wanted.clear()
    box.add("xyz")
    assert not box.store.checkpoint_wanted.is_set()


def test_environments_go_with_their_last_job(box, tmp_path):
    box.update(nexus.Put("environments", "one", {"A": "1"}), *nexus.add_job(job("abc", environment="one")))
    box.update(nexus.Put("environments", "two", {"A": "2"}), *nexus.add_job(job("xyz", 2, environment="two")))
    box.update(nexus.Put("jobs", "abc", None))
    box.store.save_checkpoint()
    again = box.crash(tmp_path / "copy").open()
    assert again.store.state.environments == {"two": {"A": "2"}} and again.dump() == box.dump()


def test_snapshots_are_made_while_changes_go_on(box, tmp_path):
    """A snapshot that takes long holds up nobody."""
    box.add(*IDS[:5])
    real, is_writing, gate = nexus.encode_state, threading.Event(), threading.Event()

    def write_slowly(*snapshot):
        pieces = list(real(*snapshot))
        yield from pieces[:3]
        is_writing.set()
        assert gate.wait(60)
        yield from pieces[3:]

    with mock.patch.object(nexus, "encode_state", write_slowly):
        thread = threading.Thread(target=box.store.save_checkpoint)
        thread.start()
        assert is_writing.wait(60)
        box.add("abc")
        box.update(set_status(IDS[0], nexus.RUNNING))
        assert box.crash(tmp_path / "copy").open().dump() == box.dump(), "killed in the middle of it"
        gate.set()
        thread.join()
    assert box.store.checkpoint_seq == 5 and box.store.state.seq == 7
    assert box.crash(tmp_path / "copy2").open().dump() == box.dump()


# Another machine

MACHINES = [  # reason, jobs run there, a change of the journal says so, whether it is refused
    ("nothing runs there", False, False, False), ("jobs run there", True, False, True),
    ("jobs run there, which the journal knows", False, True, True),
]


@pytest.mark.parametrize("reason, runs, runs_later, is_refused", MACHINES, ids=[case[0] for case in MACHINES])
def test_another_machines_state(tmp_path, reason, runs, runs_later, is_refused):
    box = Box(tmp_path / "home").open(host="gpu1")
    box.add("abc", status=nexus.RUNNING if runs else nexus.PENDING)
    box.store.save_checkpoint()
    if runs_later:
        box.update(set_status("abc", nexus.RUNNING))
    before = {name: pathlib.Path(box.path(name)).read_bytes() for name in box.names()}
    if is_refused:
        with pytest.raises(nexus.NexusError) as caught:
            Box(tmp_path / "home").open()
        assert caught.value.kind == "conflict" and "gpu1" in caught.value.message and "NEXUS_HOME" in caught.value.hint
        assert f"mv {tmp_path / 'home'} " in caught.value.hint
        assert {name: pathlib.Path(box.path(name)).read_bytes() for name in box.names()} == before, "nothing was touched"
    else:
        other = Box(tmp_path / "home").open()
        assert other.dump() == box.dump() and other.store.service_id != box.store.service_id, "nodes must tell them apart"
        other.add("xyz")
        other.store.save_checkpoint()
        assert json.loads(pathlib.Path(other.path("state.json")).read_text())["host"] == nexus.read_machine()


def test_a_machine_that_has_another_name_now(tmp_path):
    """Its boot is the one of its jobs."""
    box = Box(tmp_path / "home").open(host="gpu1").add("abc", status=nexus.RUNNING, boot_id=nexus.read_boot_id())
    box.store.save_checkpoint()
    assert Box(tmp_path / "home").open().dump() == box.dump()


def test_a_state_that_was_moved_is_this_machines_at_once(tmp_path):
    """Killed with a running job before it wrote state.json anew, it is not told that its jobs run elsewhere."""
    Box(tmp_path / "home").open(host="gpu1").add("abc").store.save_checkpoint()
    box = Box(tmp_path / "home").open()
    box.update(set_status("abc", nexus.RUNNING))
    assert box.crash(tmp_path / "copy").open().dump() == box.dump()


# The version that users wait for

def test_the_version_grows_with_what_is_on_the_disk_and_over_restarts(box, tmp_path, monkeypatch):
    first = box.store.version
    box.add("abc")
    assert first < box.store.version < (last := box.crash(tmp_path / "copy").open().store.version)
    assert last
    before = box.store.version
    monkeypatch.setattr(os, "fdatasync", failing())
    with pytest.raises(nexus.NexusError):
        box.add("xyz")
    assert box.store.version == before

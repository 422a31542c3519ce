"""What is acknowledged is on the disk, whatever happens to it."""

import contextlib
import json
import os
import pathlib
import shutil
import threading
from unittest import mock

import pytest
from makers import job, put
from stores import Box, Moments, dump, failing, live_on, made_by, new_folder, quick_disk, set_fact, set_status

import nexus

IDS = [f"a{b}{c}" for b in "xyz" for c in "KL"]


def add(*arguments, **fields):
    return nexus.Put("jobs", arguments[0], job(*arguments, **fields))


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
    monkeypatch.setattr(box.disk, "fdatasync", lambda _: pytest.fail("synced"))
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


# Every moment at which it may be killed

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
            moments.append((box.crash(f"{folder}/{len(moments)}"), [acknowledged[-1], *wanted]))

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
        for number, (place, allowed) in enumerate(moments):
            for reason, broken in BREAKS:
                assert not place.is_one_file(), "what damages one would damage both"
                if broken and broken not in place.names():
                    continue
                copy = place.crash(f"{place.folder}-{broken}")
                if broken:
                    copy.cut(broken)
                copy.open()
                assert is_among(copy, allowed), f"{reason} at {place.folder}: {place.names()}"
                assert not [said for said in copy.said if "missing" in said or "after change" in said]
                assert not copy.is_one_file()
                assert bool(copy.store.state.damage) == (broken == "state.json")
                if not broken and number % 3 == 0:
                    copy.cut("state.json")
                    assert is_among(copy.open(), allowed), f"{reason} at {place.folder}, and state.json was lost after that"
                shutil.rmtree(copy.folder)


def is_among(box, allowed):
    """Whether it has one of these states, in which nothing is paused; it is where files were damaged."""
    found = box.dump()
    assert found["facts"].pop("paused") == bool(box.store.state.damage)
    return {**found, "facts": {**found["facts"], "paused": False}} in allowed


REFUSALS = [  # reason, operations of the disk that fail
    ("no room", ["pwrite"]), ("the sync fails", ["fdatasync"]), ("the sync fails, and what was written stays", ["fdatasync", "truncate"]),
    ("a write is cut short and stays", ["half", "truncate"]), ("it cannot be opened again", ["fdatasync", "open"]),
]


@pytest.mark.parametrize("reason, names", REFUSALS, ids=[case[0] for case in REFUSALS])
def test_what_the_disk_refuses_has_not_happened(box, tmp_path, monkeypatch, reason, names):
    box.add("abc")
    before, version = box.dump(), box.store.version
    real_pwrite = box.disk.pwrite

    def write_half(handle, data, at):
        if len(data) < 100:
            failing()()
        return real_pwrite(handle, data[:50], at)

    for name in names:
        monkeypatch.setattr(box.disk, "pwrite" if name == "half" else name, write_half if name == "half" else failing())
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
    monkeypatch.setattr(box.disk, name, failing())
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
    path, rename = pathlib.Path(box.path("state.json")), box.disk.replace

    def replace(source, target):
        rename(source, target)
        if target == str(path):
            path.write_text(json.dumps({**json.loads(path.read_text()), "paused": True}))

    monkeypatch.setattr(box.disk, "replace", replace)
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


@pytest.mark.parametrize("kept, is_kept", [("0-e826fd5d", True), ("0 -e826fd5d", False), ("0-e826\nfd5d", False), ("-", False)])
def test_an_id_of_the_service_that_is_damaged_is_made_anew(tmp_path, kept, is_kept):
    """Its leases name it by a word: no GPU would ever be this service's."""
    box = Box(tmp_path / "home").open()
    box.store.save_checkpoint()
    for name in ("state.json.prev", "journal.jsonl.prev"):          # which would be taken
        pathlib.Path(box.path(name)).unlink(missing_ok=True)
    file = pathlib.Path(box.path("state.json"))
    file.write_text(file.read_text().replace(json.dumps(box.store.service_id), json.dumps(kept)))
    assert (Box(tmp_path / "home").open().store.service_id == kept) == is_kept


@pytest.mark.parametrize("reason, runs, runs_later, is_refused", MACHINES, ids=[case[0] for case in MACHINES])
def test_another_machines_state(tmp_path, reason, runs, runs_later, is_refused):
    box = Box(tmp_path / "home").open(machine_id="gpu1")
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
    box = Box(tmp_path / "home").open(machine_id="gpu1").add("abc", status=nexus.RUNNING, boot_id=nexus.read_boot_id())
    box.store.save_checkpoint()
    assert Box(tmp_path / "home").open().dump() == box.dump()


def test_a_container_of_the_machine_is_another_one(tmp_path, monkeypatch):
    """It has the same boot, and another PID namespace: jobs that run on the machine are none of its own."""
    box = Box(tmp_path / "home").open(machine_id="gpu1").add("abc", status=nexus.RUNNING, boot_id=nexus.read_boot_id())
    box.store.save_checkpoint()
    monkeypatch.setattr(nexus, "find_pid_namespace", lambda: "pid:[1]")
    with pytest.raises(nexus.NexusError, match="the service runs on gpu1"):
        Box(tmp_path / "home").open()


def test_a_state_that_was_moved_is_this_machines_at_once(tmp_path):
    """Killed with a running job before it wrote state.json anew, it is not told that its jobs run elsewhere."""
    Box(tmp_path / "home").open(machine_id="gpu1").add("abc").store.save_checkpoint()
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
    monkeypatch.setattr(box.disk, "fdatasync", failing())
    with pytest.raises(nexus.NexusError):
        box.add("xyz")
    assert box.store.version == before

"""What a state is brought back from, after crashes, damage and other versions."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import live
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import NOW, SAMPLES, facts_put, job, json_values, paths_of, put_at
from stores import Box, Moments, failing, live_on, new_folder, quick_disk, set_fact, set_status

import nexus

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
        9, nexus.encode_puts([set_fact("paused", False)])).encode()[:-1])),
    ("a line too many", rewrite("journal.jsonl", lambda content: content.replace(b"\n", b"\ngarbage\n", 1))),
    ("NUL bytes at the end, as a crash of the machine leaves them", rewrite("journal.jsonl", lambda content: content + b"\0" * 4096)),
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
    ("numbers as other programs write them", rewrite("state.json", lambda content: content.replace(b".0,", b",").replace(b".0]", b"]"))),
    ("a newer nexus's fields", lambda box: seal_anew(box, "xyz", colour=[1.0])),
]


def seal_anew(box, job_id, **fields):
    """Give a row of state.json further fields, and the checksum that anybody can make."""
    path = pathlib.Path(box.path("state.json"))
    body = json.loads(path.read_text())
    body["jobs"][job_id].update(fields)
    path.write_text(live.seal(json.dumps(body)))


def test_the_previous_file_leaves_nothing_aside(tmp_path):
    """Also when it is the same file already: then rename(2) does nothing."""
    (tmp_path / "state.json").touch()
    for _ in range(2):
        path = str(tmp_path / "state.json")
        nexus.make_previous(nexus.DISK, nexus.keep_aside(nexus.DISK, path), path)
    assert sorted(os.listdir(tmp_path)) == ["state.json", "state.json.prev"]


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    return make_history(tmp_path_factory.mktemp("history") / "home")


@pytest.mark.parametrize("reason, act", HARMLESS, ids=[case[0] for case in HARMLESS])
def test_recovery_brings_back_what_was_acknowledged(history, tmp_path, reason, act):
    box = history.crash(tmp_path / "copy")
    act(box)
    box.open()
    assert box.dump() == history.dump() and box.store.state.damage == ""
    assert not [said for said in box.said if "Recovery" in said] and not box.store.list_damaged()
    live_on(box, tmp_path)


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("reason, act", HARMLESS, ids=[case[0] for case in HARMLESS])
def test_recovery_on_a_full_disk(history, tmp_path, monkeypatch, reason, act, name):
    """All is there to be read; nothing is changed before what was recovered is on the disk again."""
    box = history.crash(tmp_path / "copy")
    act(box)
    monkeypatch.setattr(box.disk, name, failing())
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


MADE_GOOD = [  # reason, what happens to state.json: what was before it makes it good, and its owner is told
    ("cut short", lambda content: content[:len(content) // 2], "is no state file"),
    ("garbage", lambda content: GARBAGE, "is no state file"),
    ("empty", lambda content: b"", "is no state file"),
    ("of no version", lambda content: content.replace(b'"version": 3', b'"version": "x"'), "version is 'x'"),
    ("of an older version", lambda content: content.replace(b'"version": 3', b'"version": 2'), "the checksum of its facts is wrong"),
    ("of no number", lambda content: content.replace(b'"seq": 5', b'"sep": 5'), "is no state file"),
    ("another number", lambda content: content.replace(b'"seq": 5', b'"seq": 4'), "the checksum of its facts is wrong"),
    ("another machine's", lambda content: content.replace(b'"host": "', b'"host": "x'), "the checksum of its facts is wrong"),
    ("a fact of another name", lambda content: content.replace(b'"next_number"', b'"next_numbes"'), "the checksum of its facts is wrong"),
    ("no checksum of the facts", lambda content: content.replace(b'"crc": ', b'"csc": '), "its facts have no checksum"),
    ("a table of another name", lambda content: content.replace(b'"environments": {', b'"environmentt": {'), "it has no environments"),
    ("without a job", lambda content: b"".join(line for line in content.splitlines(True) if not line.startswith(b'"abc": ')),
     "it has 2 rows, and had 3"),
    ("an unknown field", lambda content: content.replace(b'"xyz": {', b'"xyz": {"colour":[1],'),
     "job xyz cannot be understood: its checksum"),
    ("a status that is none", lambda content: content.replace(b'"status":"running"', b'"status":"walking"'),
     "job abc cannot be understood"),
    ("a field of another name", lambda content: content.replace(b'"status":"running"', b'"stauus":"running"'),
     "job abc cannot be understood"),
    ("a job of another id", lambda content: content.replace(b'"abc": {', b'"abb": {'), "job abb cannot be understood"),
    ("a job in the place of another", lambda content: content.replace(b'"abc": {', b'"xyz": {'), "it has 2 rows, and had 3"),
    ("an environment of another key", lambda content: content.replace(b'"eeeeeeee": {', b'"eeeeeeed": {'),
     "environments eeeeeeed cannot be understood: its name is eeeeeeee"),
    ("a variable of another name", lambda content: content.replace(b'"A":"b', b'"C":"b'),
     "environments eeeeeeee cannot be understood: its checksum"),
    ("a row without its checksum", lambda content: re.sub(rb',"crc":[0-9]+}\n}}', b"}\n}}", content),
     "job xyz cannot be understood: it has no checksum"),
    ("nothing in the place of a job", lambda content: re.sub(rb'"xyz": {.*}\n', b'"xyz": null\n', content), "job xyz cannot be understood"),
    ("a pause that is none", lambda content: content.replace(b'"paused": true', b'"paused": 1'), "facts paused cannot be understood"),
]


@pytest.mark.parametrize("reason, change, words", MADE_GOOD, ids=[case[0] for case in MADE_GOOD])
def test_what_state_json_has_lost_is_taken_from_before_it(history, tmp_path, reason, change, words):
    box = history.crash(tmp_path / "copy")
    rewrite("state.json", change)(box)
    content = pathlib.Path(box.path("state.json")).read_bytes()
    before = read_pair(box)
    box.open()
    assert box.dump() == history.dump() and box.store.state.paused
    assert words in box.store.state.damage and "state.json.prev was read in its place" in box.store.state.damage
    aside, = [name for name in box.names() if ".broken-" in name]
    assert pathlib.Path(box.path(aside)).read_bytes() == content, "kept for a person to look at"
    assert os.stat(box.path(aside)).st_mode & 0o777 == 0o600
    assert read_pair(box) == before, "what it was recovered from stays until there is something better"
    live_on(box, tmp_path)


def read_pair(box):
    return [pathlib.Path(box.path(name)).read_bytes() for name in ("state.json.prev", "journal.jsonl.prev")]


DAMAGE = [  # reason, what happens, what is known to be missing
    ("a line in the middle is garbage", rewrite("journal.jsonl", change_line(1, b"garbage\n")), "after change 6 comes change 8"),
    ("a bit in the middle", rewrite("journal.jsonl", lambda content: content.replace(b'"completed"', b'"complfted"', 1)),
     "after change 6 comes change 8"),
    ("a change of no table", rewrite("journal.jsonl", lambda content: content.replace(b'"jobs":{"abc":{', b'"jubs":{"abc":{')),
     "after change 6 comes change 8"),
    ("a change with an unknown field", rewrite("journal.jsonl", lambda content: content.replace(b'"abc":{', b'"abc":{"colour":1,')),
     "after change 6 comes change 8"),
    ("the last line is garbage", rewrite("journal.jsonl", change_line(2, b"garbage\n")), "its last line cannot be read"),
    ("a bit in the last line", rewrite("journal.jsonl", lambda content: content.replace(b'"xyz":null', b'"xyy":null')),
     "its last line cannot be read"),
    ("the end of the last line", rewrite("journal.jsonl", lambda content: content[:-1] + b"\x0b"), "its last line cannot be read"),
    ("the last line has no checksum", rewrite("journal.jsonl", lambda content: re.sub(rb',"crc":[0-9]+}\n$', b"}\n", content)),
     "its last line cannot be read"),
    ("the last lines are garbage", both(rewrite("journal.jsonl", change_line(1, b"x\n")),
                                        rewrite("journal.jsonl", change_line(2, b"y\n"))),
     "its last 2 lines cannot be read"),
    ("the last line is garbage, and a torn one follows", both(
        rewrite("journal.jsonl", change_line(2, b"garbage\n")), rewrite("journal.jsonl", lambda content: content + b'{"put":{"jo')),
     "its last line cannot be read"),
    ("the last line of the journal before, and state.json", both(
        rewrite("journal.jsonl.prev", lambda content: content[:-5] + b"garbage\n"), remove("state.json"),
        rewrite("journal.jsonl", lambda _: b"")), "its last line cannot be read"),
    ("a line of the journal before, and state.json", both(
        rewrite("journal.jsonl.prev", lambda content: content[:-5] + b"garbage\n"), remove("state.json")), "after change 4 comes change 6"),
    ("both state files are gone", remove("state.json", "state.json.prev"), "after change 0 comes change 4"),
    ("the journal is gone", remove("journal.jsonl"), "journal.jsonl is missing"),
    ("both are garbage, and the journals empty", both(*(rewrite(name, lambda _: b"") for name in (
        "state.json", "state.json.prev", "journal.jsonl", "journal.jsonl.prev"))), "the jobs of both are lost"),
]


@pytest.mark.parametrize("reason, act, words", DAMAGE, ids=[case[0] for case in DAMAGE])
def test_damage_is_told_and_the_rest_is_brought_back(history, tmp_path, reason, act, words):
    box = history.crash(tmp_path / "copy")
    act(box)
    has_garbage = any(b"garbage" in pathlib.Path(box.path(name)).read_bytes() for name in box.names())
    box.open()
    assert words in " ".join(box.said), box.said
    assert words in box.store.state.damage and box.store.state.paused
    kept, = box.store.list_damaged()
    assert ("garbage" in pathlib.Path(kept).read_text()) == has_garbage
    live_on(box, tmp_path)


def as_version_2(box):
    """The files as version 2 wrote them: without checksums, and with the bare rows of two tables."""
    def unwrap(tables):
        for table, name in nexus.WRAPPED.items():
            tables[table] = {key: row and row[name] for key, row in tables.get(table, {}).items()}
        for row in [row for rows in tables.values() if isinstance(rows, dict) for row in rows.values() if isinstance(row, dict)]:
            row.pop("crc", None)
        return tables

    for name in box.names():
        path = pathlib.Path(box.path(name))
        if name.startswith("journal"):
            bodies = [json.loads(line) for line in path.read_text().splitlines()]
            path.write_text("".join(f'{{"seq":{body["seq"]},"put":{json.dumps(unwrap(body["put"]), separators=(",", ":"))}}}\n'
                                    for body in bodies))
        else:
            body = unwrap(json.loads(path.read_text()))
            for key in ("crc", "checksums", "tables", "rows", "damage", "usage"):
                del body[key]
            lines = ",\n".join(f"{json.dumps(key)}: {{\n" + ",\n".join(
                f"{json.dumps(one)}: {json.dumps(row, separators=(',', ':'))}" for one, row in fact.items()) + "\n}"
                if isinstance(fact, dict) else f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in {**body, "version": 2}.items())
            path.write_text(f"{{{lines}}}\n")


def damage_old(old, new, name="state.json"):
    """Of files of version 2, where nothing older makes it good."""
    return both(as_version_2, remove("state.json.prev", "journal.jsonl.prev"),
                rewrite(name, lambda content: content.replace(old, new, 1)))


LOST = [  # reason, what happens, words of what is told, jobs that are left
    ("a field of another type", damage_old(b'"xyz": {', b'"xyz": {"retries":"2",'),
     "job xyz cannot be understood: retries is '2', and not int", {"abc", "uvw"}),
    ("an unknown field", damage_old(b'"xyz": {', b'"xyz": {"colour":[1],'),
     "job xyz cannot be understood: it has no colour", {"abc", "uvw"}),
    ("a status of another name", damage_old(b'"status":"running"', b'"stauus":"running"'),
     "job abc cannot be understood: it has no stauus", {"abc", "uvw"}),
    ("an attempt's field of another name", damage_old(b'"attempts":[{"number"', b'"attempts":[{"numbes"'),
     "job abc cannot be understood: it has no numbes", {"abc", "uvw"}),
    ("no id", damage_old(b'"xyz": {', b'"/etc": {'), "job /etc cannot be understood: its id is xyz", {"abc", "uvw"}),
    ("a fact", damage_old(b'"paused": true', b'"paused": "no"'), "facts paused cannot be understood: paused is 'no', and not bool",
     {"abc", "uvw"}),
    ("a fact of another name", damage_old(b'"next_number"', b'"next_numbes"'), "state.json: it has no next_numbes", {"abc", "uvw"}),
    ("an environment", damage_old(b'{"A":"b', b'{"A":5,"B":"b'), "environments eeeeeeee cannot be understood: its variables are not texts",
     {"abc", "uvw"}),
    ("a change of a job", damage_old(b'"status":"completed"', b'"status":7', "journal.jsonl"),
     "change 7: job abc cannot be understood: status is 7, and not str", {"abc", "uvw"}),
    ("a change of another name", damage_old(b'"put":', b'"pot":', "journal.jsonl"), "after change 5 comes change 7", {"abc"}),
    ("a table of another name", damage_old(b'"jobs":{"uvw"', b'"jubs":{"uvw"', "journal.jsonl"),
     "change 6: jubs uvw cannot be understood", {"abc"}),
    ("the number of a change", damage_old(b'"seq":6', b'"seq":99', "journal.jsonl"), "after change 5 comes change 99", {"abc", "uvw"}),
]


@pytest.mark.parametrize("reason, act, words, left", LOST, ids=[case[0] for case in LOST])
def test_what_cannot_be_understood_costs_its_job_alone_and_is_kept(history, tmp_path, reason, act, words, left):
    box = history.crash(tmp_path / "copy")
    act(box)
    box.open()
    assert set(box.store.state.jobs) == left and any(words in said for said in box.said), box.said
    assert words in box.store.state.damage and box.store.state.paused
    kept, = box.store.list_damaged()
    assert kept in box.said[-1] and os.stat(kept).st_mode & 0o777 == 0o600
    assert any(words in one["words"] for one in map(json.loads, pathlib.Path(kept).read_text().splitlines()))
    live_on(box, tmp_path)


def test_an_environment_is_told_nowhere(history, tmp_path):
    """Of a damaged one, only the file that is kept has its content."""
    for name in ("state.json", "journal.jsonl.prev"):
        for old, new in ((b'"variables":{"A":"b', b'"variables":{"A":1,"SECRET":"hunter2'),
                         (b'"variables":{', b'"variables":"hunter2","C":{')):
            box = history.crash(tmp_path / f"{name}-{len(old)}")
            remove("state.json.prev" if name == "state.json" else "state.json")(box)
            rewrite(name, lambda content, old=old, new=new: content.replace(old, new))(box)
            box.open()
            assert "hunter2" not in f"{box.said} {box.store.state.damage}"


def put_line(number, **fact):
    """A line of the journal of version 2."""
    return json.dumps({"seq": number, "put": {"facts": fact}}) + "\n"


def seal_line(number, **fact):
    return nexus.encode_transaction(number, nexus.encode_puts(facts_put(**fact)))


BESIDE = [  # reason, what the state file is, lines after its number 5; the number that is reached, words of what is damaged
    ("version 3, with checksums", 3, [seal_line(6), seal_line(7)], 7, ""),
    ("version 3, a line without", 3, [seal_line(6), put_line(7)], 6, "its last line cannot be read"),
    ("version 3, a line without before others", 3, [put_line(6), seal_line(7)], 7, "after change 5 comes change 7"),
    ("version 3, a former line without", 3, [put_line(4), put_line(5), seal_line(6)], 6, ""),
    ("version 2, as it was left", 2, [put_line(6), put_line(7)], 7, ""),
    ("version 2, from which version 3 went on", 2, [put_line(6), seal_line(7)], 7, ""),
    ("version 2, a line without after one with", 2, [seal_line(6), put_line(7)], 6, "its last line cannot be read"),
    ("version 2, a wrong checksum", 2, [put_line(6), seal_line(7).replace('"seq":7', '"seq":8')], 6, "its last line cannot be read"),
    ("none, from the first change on, of version 2", 0, [put_line(1), put_line(2)], 2, ""),
    ("none, from the first change on, of version 3", 0, [seal_line(1), seal_line(2)], 2, ""),
    ("none, and later changes", 0, [seal_line(6)], 6, "after change 0 comes change 6"),
    ("none, and no changes", 0, [], 0, ""),
]


@pytest.mark.parametrize("reason, version, lines, last, words", BESIDE, ids=[case[0] for case in BESIDE])
def test_which_lines_count_beside_which_state_file(history, tmp_path, reason, version, lines, last, words):
    box = history.crash(tmp_path / "copy")
    if version == 2:
        as_version_2(box)
    remove("state.json.prev", "journal.jsonl.prev", *([] if version else ["state.json"]))(box)
    pathlib.Path(box.path("journal.jsonl")).write_text("".join(lines))
    box.open()
    assert box.store.state.seq == last and box.store.state.damage.startswith(f"journal.jsonl: {words}" if words else "")
    assert bool(words) == bool(box.store.state.damage), box.store.state.damage
    live_on(box, tmp_path)


# A power cut keeps what was not synced in any order: what it loses is zeros, and was not acknowledged

def cut_line(number, unsynced=0):
    return nexus.encode_transaction(number, nexus.encode_puts(facts_put(paused=False)), unsynced).encode()


def zeros(line, part=0.0):
    """A line of which a power cut has kept so much."""
    kept = line[:int(len(line) * part)]
    return kept + bytes(len(line) - len(kept))


SEVENTH, EIGHTH = cut_line(7), cut_line(8, 1)
POWER_CUTS = [  # reason, the lines after number 6, the number that is reached, words of what is damaged
    ("nothing is lost", [SEVENTH, EIGHTH], 8, ""),
    ("the last is torn", [SEVENTH, zeros(EIGHTH, 0.5)], 7, ""),
    ("of the last its end alone is lost", [SEVENTH, EIGHTH[:-1] + b"\0"], 7, ""),
    ("an earlier one is lost", [zeros(SEVENTH), EIGHTH], 6, ""),
    ("of an earlier one a part is lost", [zeros(SEVENTH, 0.5), EIGHTH], 6, ""),
    ("of an earlier one its end alone is lost", [SEVENTH[:-1] + b"\0", EIGHTH], 6, ""),
    ("a block in the middle is lost, and the end of a line is there", [SEVENTH[:20] + bytes(60) + EIGHTH[30:]], 6, ""),
    ("the beginning of a line is lost", [bytes(20) + SEVENTH[20:], EIGHTH], 6, ""),
    ("two are lost, and a third is there", [zeros(SEVENTH), zeros(EIGHTH, 0.3), cut_line(9, 2)], 6, ""),
    ("one is lost, one there, and one torn", [zeros(SEVENTH), EIGHTH, zeros(cut_line(9, 2), 0.7)], 6, ""),
    ("the one after had it synced", [zeros(SEVENTH), cut_line(8)], 6, "its last line cannot be read"),
    ("a later one had it synced", [zeros(SEVENTH), EIGHTH, cut_line(9)], 9, "after change 6 comes change 9"),
    ("a later one had it synced, and others not", [zeros(SEVENTH), EIGHTH, cut_line(9, 2), cut_line(10, 2)], 10,
     "after change 6 comes change 9"),
    ("the end of the last has not told", [SEVENTH[:20] + bytes(100) + EIGHTH[-9:]], 6, "its last line cannot be read"),
    ("the end of the last tells that it was synced", [zeros(SEVENTH), cut_line(8)[-30:]], 6, "its last line cannot be read"),
    ("the last has a hole, and its end", [SEVENTH[:9] + bytes(9) + SEVENTH[18:]], 6, "its last line cannot be read"),
    ("it is garbage", [b"garbage\n", EIGHTH], 8, "after change 6 comes change 8"),
    ("a later one is garbage", [zeros(SEVENTH), EIGHTH, b"garbage\n"], 6, "its last 2 lines cannot be read"),
    ("a bit makes a zero", [SEVENTH[:9] + b"\0" + SEVENTH[10:], EIGHTH], 8, "after change 6 comes change 8"),
    ("a bit of what it tells", [zeros(SEVENTH), EIGHTH.replace(b'"unsynced":1', b'"unsynced":3')], 6, ""),
    ("it is not there", [EIGHTH], 8, "after change 6 comes change 8"),
]


@pytest.mark.parametrize("reason, lines, last, words", POWER_CUTS, ids=[case[0] for case in POWER_CUTS])
def test_what_a_power_cut_took_before_it_was_synced_is_no_damage(history, tmp_path, reason, lines, last, words):
    box = history.crash(tmp_path / "copy")
    remove("state.json.prev", "journal.jsonl.prev")(box)
    pathlib.Path(box.path("journal.jsonl")).write_bytes(b"".join([cut_line(6), *lines]))
    box.open()
    assert box.store.state.seq == last and box.store.state.damage.startswith(f"journal.jsonl: {words}" if words else "")
    assert bool(words) == bool(box.store.state.damage) == box.store.state.paused, box.store.state.damage
    live_on(box, tmp_path)


def test_a_line_tells_how_many_before_it_are_not_synced(history, tmp_path):
    """Also those that a killed service has left are, once another one writes."""
    box = history.crash(tmp_path / "home").open()
    for is_synced in (False, False, True, False):
        box.store.update(lambda _: [set_fact("paused", not box.store.state.paused)], is_synced=is_synced)
    other = box.crash(tmp_path / "other").open()
    for is_synced in (False, True):
        other.store.update(lambda _: [set_fact("paused", not other.store.state.paused)], is_synced=is_synced)
    lines = pathlib.Path(other.path("journal.jsonl")).read_bytes().splitlines()[-6:]
    assert [json.loads(line).get("unsynced", 0) for line in lines] == [0, 1, 2, 0, 0, 1]


# Homes that version 2 wrote: see samples/homes/index.md

HOMES = sorted(path.name for path in (SAMPLES / "homes").iterdir() if path.is_dir())


def load_sample(name, folder):
    shutil.copytree(SAMPLES / "homes" / name, folder)
    return Box(folder)


def fold(folder):
    """{table: rows} of the files of version 2, and the number of the last change, by no code of nexus's."""
    body = json.loads((folder / "state.json").read_text())
    seq, tables = body["seq"], {name: fact for name, fact in body.items() if isinstance(fact, dict)}
    tables["facts"] = {name: fact for name, fact in body.items() if not isinstance(fact, dict) and name not in ("version", "seq")}
    for line in map(json.loads, (folder / "journal.jsonl").read_text().splitlines()):
        if line["seq"] > seq:
            seq = line["seq"]
            for table, rows in line["put"].items():
                tables[table] = {key: row for key, row in {**tables[table], **rows}.items() if row is not None}
    return tables, seq


@pytest.mark.parametrize("name", HOMES)
def test_what_version_2_wrote_is_all_there(name, tmp_path, monkeypatch):
    monkeypatch.setattr(nexus, "read_machine", lambda: "gpu1")
    wanted, last = fold(SAMPLES / "homes" / name)
    box = load_sample(name, tmp_path / "home")
    before = {each: pathlib.Path(box.path(each)).read_bytes() for each in ("state.json", "journal.jsonl")}
    state = box.open().store.state
    assert state.seq == last and box.said == [] and not box.store.list_damaged()
    assert state.damage == "" and state.paused == wanted["facts"]["paused"]
    for table in nexus.ROWS:
        found = {key: json.loads(nexus.encode_json(row)) for key, row in getattr(state, table).items()}
        rows = wanted.get(table, {})
        if table == "jobs":
            rows = {key: {"status": find_status(row), **row} for key, row in rows.items()}
        used = [job["environment"] for job in wanted["jobs"].values()]
        assert found == {key: row for key, row in rows.items() if table != "environments" or key in used}
    assert {key: json.loads(nexus.encode_json(getattr(state, key))) for key in wanted["facts"]} == wanted["facts"]
    assert any(row for table in nexus.ROWS for row in wanted.get(table, ())) and len(wanted["jobs"]) > 2, "the sample has something in it"
    # Version 3 is written before anything else, and what was there is kept whole.
    assert json.loads(pathlib.Path(box.path("state.json")).read_text())["version"] == 3
    assert pathlib.Path(box.path("journal.jsonl")).read_bytes() == b""
    assert {each: pathlib.Path(box.path(f"{each}.prev")).read_bytes() for each in before} == before
    box.add("zzz")
    other = box.crash(tmp_path / "other")
    other.cut("state.json")
    assert is_same_but_paused(other.open(), box), "and could be gone back to"
    live_on(box, tmp_path)


def find_status(row):
    """The status of a job whose row has none: it is pending, or waits in Slurm's queue, which version 2 did not tell apart."""
    last = row.get("attempts", [{}])[-1]
    return "submitted" if "slurm_key" in last and "finished_at" not in last else "pending"


def is_same_but_paused(box, other):
    return box.dump()["jobs"] == other.dump()["jobs"] and box.store.state.damage and not other.store.state.damage


def test_version_3_comes_before_anything_that_version_2_could_not_read(tmp_path, monkeypatch):
    """At whatever moment the first start is killed, there is nothing of version 3 beside a state.json of version 2."""
    monkeypatch.setattr(nexus, "read_machine", lambda: "gpu1")
    with quick_disk():
        for name in ("running", "scripts"):
            box, moments = load_sample(name, tmp_path / name), []

            def look(box=box, moments=moments, name=name):
                moments.append(box.crash(tmp_path / f"{name}-{len(moments)}"))

            with Moments(look):
                box.open()
                wanted = box.dump()
                box.add("zzz")
            for place in moments:
                version = json.loads(pathlib.Path(place.path("state.json")).read_text())["version"]
                assert version == 3 or b"crc" not in pathlib.Path(place.path("journal.jsonl")).read_bytes().replace(b'"crc":"1"', b"")
                found = place.open().dump()
                assert found in (wanted, box.dump()) and not place.said and not place.store.state.damage


def test_names_that_only_former_versions_knew_are_no_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(nexus, "read_machine", lambda: "gpu1")
    box = load_sample("running", tmp_path / "home")
    rewrite("state.json", lambda content: content.replace(b'"has_hook"', b'"hooks_since": 5, "inventory": {}, "has_hook"').replace(
        b'{"id":"abc"', b'{"id":"abc","is_told":true').replace(b'{"number":1', b'{"number":1,"may_pass":false'))(box)
    rewrite("journal.jsonl", lambda content: content.replace(b'"facts":{', b'"facts":{"hooks_since":5,').replace(
        b'{"id":"abe"', b'{"id":"abe","content":"c0"'))(box)
    box.open()
    assert not box.said and not box.store.state.damage and len(box.store.state.jobs) == 4


@pytest.mark.parametrize("is_saved", [True, False], ids=["in state.json", "in the journal"])
def test_what_waits_in_slurms_queue_was_pending_once(box, tmp_path, is_saved):
    """So wrote the first ones of version 3; samples/homes/slurm is of version 2."""
    there, over = nexus.Attempt(1, slurm_key="k1", slurm_id="7"), nexus.Attempt(1, slurm_key="k2", finished_at=NOW, cause="requeued")
    box.update(*nexus.add_job(job("abc", status="submitted", attempts=(there,))), *nexus.add_job(job("abd", 2, attempts=(over,))))
    if is_saved:
        box.store.save_checkpoint()
    before, old = box.dump(), box.crash(tmp_path / "old")
    for name in ("state.json", "journal.jsonl"):
        path = pathlib.Path(old.path(name))
        path.write_text(live.seal(path.read_text().replace('"submitted"', '"pending"')))
    assert "submitted" not in "".join(pathlib.Path(old.path(name)).read_text() for name in ("state.json", "journal.jsonl"))
    assert old.open().dump() == before and old.said == []
    assert [one.status for one in old.store.state.jobs.values()] == ["submitted", "pending"]


# What was left out


def test_a_job_that_may_have_started_is_held(box, tmp_path):
    """Its start was lost with a line: its folder, or the line as far as it can be read, tells."""
    box.add("abc", "abd", "xyz", "uvw")
    for job_id in ("abc", "abd"):
        box.update(set_status(job_id, nexus.RUNNING))
    box.update(set_status("abd", nexus.COMPLETED))
    copy = box.crash(tmp_path / "copy")
    for job_id in ("abc", "abd"):
        os.makedirs(copy.path(f"logs/job_{job_id}"))
        pathlib.Path(copy.path(f"logs/job_{job_id}/attempt-1")).write_text("12 34\n")
    rewrite("journal.jsonl", lambda content: content.replace(b'"running"', b'"runninh"').replace(
        b'{"put":{"jobs":{"abc":{"attempts"', b'{"put":{"jobs":{"abb":{"attempts"'))(copy)
    copy.open()
    jobs = copy.store.state.jobs
    assert [jobs[one].status for one in ("abc", "abd")] == [nexus.PENDING, nexus.COMPLETED], "that is known from a later line"
    assert [one for one in jobs if jobs[one].is_held] == ["abc"]
    assert any("held, as they have begun" in said and ": abc" in said for said in copy.said)
    other = box.crash(tmp_path / "other")
    rewrite("journal.jsonl", lambda content: content.replace(b'"completed"', b'"complfted"').replace(b'"running"', b'"runninh"'))(other)
    other.open()
    assert [one for one, job in other.store.state.jobs.items() if job.is_held] == ["abc", "abd"]
    assert any("held, as they may have changed" in said and "abc, abd" in said for said in other.said)


def test_a_job_whose_wait_would_not_end_is_held(box, tmp_path):
    """What it waits for was lost with a line, or that it is over."""
    box.add("abc").add("abd").add("xyz", after_any=("abd", "abc"), pending_dependencies=("abd", "abc")).add("uvw")
    copy = box.crash(tmp_path / "copy")
    rewrite("journal.jsonl", lambda content: content.replace(b'"abd":{', b'"abd":['))(copy)
    copy.open()
    held = {one: job.pending_dependencies for one, job in copy.store.state.jobs.items() if job.is_held}
    assert held == {"xyz": ("abc",)} and "abd" not in copy.store.state.jobs
    assert any("held, as what they wait for is over or lost" in said and ": xyz" in said for said in copy.said)
    box.update(set_status("abd", nexus.RUNNING))
    box.update(set_status("abd", nexus.COMPLETED))          # and what releases xyz was lost
    copy = box.crash(tmp_path / "other").open()
    assert {one: job.pending_dependencies for one, job in copy.store.state.jobs.items() if job.is_held} == {"xyz": ("abc",)}


def test_a_job_whose_wait_for_a_group_would_not_end_is_held(box, tmp_path):
    """The last job of the group was lost with a line; of another group there is one."""
    box.update(*nexus.add_job(job("abc", group="g")), *nexus.add_job(job("abe", 2, group="h")))
    box.update(nexus.Put("jobs", "abc", None))
    box.update(*nexus.add_job(job("abd", 3, group="g")))
    box.update(*nexus.add_job(job("xyz", 4, after_group=("g", "h"), pending_groups=("g", "h"))))
    copy = box.crash(tmp_path / "copy")
    rewrite("journal.jsonl", lambda content: content.replace(b'"abd":{', b'"abd":['))(copy)
    copy.open()
    jobs = copy.store.state.jobs
    assert {one: job.pending_groups for one, job in jobs.items() if job.is_held} == {"xyz": ("h",)} and "abd" not in jobs


def test_a_job_that_was_launched_may_still_begin(box, tmp_path):
    """Its start was lost with a line, and its job.sh has not claimed it yet.  Without damage, job.sh means nothing."""
    box.add("abc", "abd")
    box.update(set_status("abc", nexus.RUNNING))
    box.update(set_status("abd", nexus.RUNNING))
    box.update(set_status("abd", nexus.COMPLETED))
    box.add("xyz")
    for name, is_damaged in (("whole", False), ("damaged", True)):
        copy = box.crash(tmp_path / name)
        for job_id in ("abc", "xyz")[:1 + (not is_damaged)]:
            os.makedirs(copy.path(f"logs/job_{job_id}"))
            pathlib.Path(copy.path(f"logs/job_{job_id}/job.sh")).touch()
        if is_damaged:
            rewrite("journal.jsonl", lambda content: content.replace(b'"running"', b'"runninh"', 1))(copy)
        held = [one for one, found in copy.open().store.state.jobs.items() if found.is_held]
        assert held == ["abc"] * is_damaged


CLAIMS = [  # reason, seconds from the job's creation to the claim, attempts that are known, whether it is held
    ("of its first attempt", 5, 0, True), ("of a former job of this id", -5, 0, False), ("of an attempt that is known", 5, 1, False),
]


@pytest.mark.parametrize("reason, after_s, known, is_held", CLAIMS, ids=[case[0] for case in CLAIMS])
def test_a_pending_job_whose_attempt_is_claimed_does_not_begin_it_again(box, tmp_path, reason, after_s, known, is_held):
    """Its start was on the disk before it began: the journal was cut where no line tells, or an older one was put back."""
    attempts = (nexus.Attempt(1, started_at=NOW, finished_at=NOW, exit_code=1),) * known
    box.update(*nexus.add_job(job("abc", attempts=attempts)), *nexus.add_job(job("xyz", 2)))
    claim = pathlib.Path(box.path("logs/job_abc/attempt-1"))
    claim.parent.mkdir(parents=True)
    claim.touch()
    os.utime(claim, (job().created_at + after_s,) * 2)
    box = Box(box.folder).open()
    assert [one for one, job in box.store.state.jobs.items() if job.is_held] == ["abc"] * is_held
    assert bool(box.store.state.damage) == box.store.state.paused == is_held


def test_a_pause_for_damage_lasts_until_it_is_resumed(history, tmp_path):
    box = history.crash(tmp_path / "copy")
    rewrite("journal.jsonl", change_line(1, b"garbage\n"))(box)
    box.open()
    damage = box.store.state.damage
    assert damage and nexus.find_pause(box.store.state) == nexus.PAUSED_BY_DAMAGE
    for number in range(2):
        box = box.crash(tmp_path / f"again{number}").open()
        assert box.store.state.damage == damage and box.store.state.paused and not box.said
        if number:
            box.add("aaa")
            box.store.save_checkpoint()
    edited = box.crash(tmp_path / "edited")
    rewrite("state.json", lambda content: content.replace(b'"paused": true', b'"paused": false'))(edited)
    edited.open()
    assert not edited.store.state.paused and not edited.store.state.damage and not edited.said
    edited.update(set_fact("paused", True))
    assert nexus.find_pause(edited.crash(tmp_path / "later").open().store.state) == nexus.PAUSED, "a user's own"
    box.update(*nexus.pause_queue(False))
    assert nexus.find_pause(box.crash(tmp_path / "resumed").open().store.state) is None


@given(st.data())
def test_whatever_stands_in_the_place_of_a_field_no_other_job_is_lost(history, data):
    """In files of version 2, where no checksum tells that it does."""
    name = data.draw(st.sampled_from(["state.json", "state.json.prev", "journal.jsonl.prev", "journal.jsonl", "all there is"]))
    new = data.draw(json_values | st.integers(-1, 9))
    with quick_disk(), new_folder() as folder:
        box = history.crash(f"{folder}/copy")
        as_version_2(box)
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
            assert {one: nexus.replace(jobs[one], is_held=False) for one in wanted} == wanted
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
    assert box.names() == ["journal.jsonl", "state.json", "state.json.prev"]
    again = box.crash(tmp_path / "copy").open()
    assert again.store.service_id == box.store.service_id, "the leases are this service's"
    assert os.stat(box.path("state.json")).st_mode & 0o777 == os.stat(box.path("journal.jsonl")).st_mode & 0o777 == 0o600

"""What a disk or a hand may do to state.json and the journal, and whether nexus notices it.

    home = Home(folder)
    assert not home.find_fault("state.json", flip(content, bit), place)         # words, where it was not noticed

tests/unit/test_damage.py does some of it, tests/bench/disk.py all.
"""

import json
import logging
import os
import pathlib
import shutil
from unittest import mock

from makers import NOW, config, job

import nexus

CONFIG = config()
SAID = logging.Logger("damage", logging.CRITICAL)
STARTED = (nexus.RUNNING, *nexus.FINAL)


class Home:
    """The files of a service that was killed, with a state and a journal to replay."""

    def __init__(self, folder):
        """Make it: jobs of all statuses, in both files, and the claims of those that have begun."""
        self.folder = pathlib.Path(folder)
        store = self.open(self.folder)
        self.states = [dump(store)]                     # after each change
        number = 0

        def update(*changes):
            store.update(lambda state: [change(state) if callable(change) else change for change in changes])
            self.states.append(dump(store))

        def add(job_id, **fields):
            nonlocal number
            number += 1
            update(*nexus.add_job(job(job_id, number, environment="e1", **fields)))

        def start(job_id, **facts):
            update(lambda state: nexus.change_job(nexus.begin_attempt(
                state.jobs[job_id], started_at=NOW, nonce="00ff", boot_id="b", **facts), status=nexus.RUNNING))
            folder = self.folder / f"logs/job_{job_id}"
            folder.mkdir(parents=True)
            (folder / "attempt-1").write_text("12 34\n")

        def end(job_id, status):
            update(lambda state: nexus.change_job(state.jobs[job_id], status=status, finished_at=NOW + 7200, exit_code=0,
                                                  runtime_seconds=7200.0, cause_line="größe \udcff"))

        update(nexus.Put("environments", "e1", {"TOKEN": "hunter2", "ODD": "1.0, \"\\\n🚀"}), nexus.Put("seen", "0123456789abcdef", 2),
               nexus.Put("groups", "g", nexus.Group("g", limit=2)),
               nexus.Put("nodes", "n1", nexus.KnownNode(nexus.NodeConfig("n1", "10.0.0.5"))),
               nexus.Put("usage", "2024-10-24 ann", nexus.PastUsage("2024-10-24", "ann", {"g": nexus.UsageSums(7200.5, 0.0, 2)})))
        for job_id in ("abc", "abd", "abe"):
            add(job_id, group="g", timeout_seconds=7200.0)
        start("abc", gpu_indices=(0,), gpu_uuids=("GPU-0",))
        store.save_checkpoint()
        start("abd")
        end("abd", nexus.COMPLETED)
        store.save_checkpoint()
        add("abf", command="echo 'größe'", after=("abe",), pending_dependencies=("abe",))
        start("abe")
        update(nexus.Put("seen", "0123456789abcdef", 3))
        end("abc", nexus.FAILED)
        store.journal.close()

    def open(self, folder):
        """The Store of a service that starts in a folder like this.  Raises: what it refuses."""
        made = nexus.Store(nexus.make_layout(str(folder), CONFIG), nexus.Clock(), nexus.DISK, SAID)
        with mock.patch.multiple(nexus.Disk, fsync=lambda *_: None, fdatasync=lambda *_: None):
            made.recover()
        return made

    def find_fault(self, name, content, place, missing=()):
        """What is wrong when a file has this content and those are missing; "" if nothing.  `place`: where to try it."""
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place)
        for one in missing:
            os.unlink(os.path.join(place, one))
        before = pathlib.Path(place, name).read_bytes()
        pathlib.Path(place, name).write_bytes(content)
        try:
            store = self.open(place)
        except nexus.NexusError as error:
            is_told = any(words in error.message for words in ("newer nexus", "the service runs on"))       # on a machine that is none
            return "" if is_told else f"it does not start: {error.message}"
        store.journal.close()
        found, wanted, state = dump(store), self.states[-1], store.state
        again = [one for one, job in state.pending.items() if not job.is_held and wanted["jobs"][one].status in STARTED]
        if again:
            return f"{again[0]} would start again"
        if state.damage:
            words = f"{state.damage} {store.list_damaged()}"
            return "" if state.paused and store.list_damaged() and "hunter2" not in words else f"badly told: {words}"
        is_cut = name.startswith("journal") and before.startswith(content.rstrip(b"\0"))    # as an interrupted write leaves it
        if any(found == one for one in (self.states if is_cut else self.states[-1:])):
            return ""
        changed = {key for key in nexus.FACTS if found["facts"].get(key) != wanted["facts"].get(key)}
        is_edit = name.startswith("state") and changed <= set(nexus.EDITABLE) and {**found, "facts": 0} == {**wanted, "facts": 0}
        return "" if is_edit else f"unnoticed: {json.dumps(sorted(changed))} {sorted(state.jobs)}"


def dump(store):
    state = store.state
    return {"facts": {name: getattr(state, name) for name in nexus.FACTS if name not in ("host", "service_id")},
            **{table: dict(getattr(state, table)) for table in nexus.ROWS}}


def flip(content, bit):
    """One bit, as a disk does."""
    return content[:bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1:]


def mutate(content, random):
    """(what was done, the content then)"""
    at, lines = random.randrange(len(content)), content.splitlines(keepends=True)
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.choice(["bit", "bit", "bit", "byte", "bytes", "cut", "twice", "swapped", "without", "digit", "zeros"])
    if kind == "bit":
        return f"bit {at}", flip(content, at * 8 + random.randrange(8))
    if kind == "byte":
        return f"byte {at} deleted", content[:at] + content[at + 1:]
    if kind == "bytes":
        length = random.randrange(1, 40)
        return f"{length} bytes at {at}", content[:at] + random.randbytes(length) + content[at + length:]
    if kind == "cut":
        return f"cut at {at}", content[:at]
    if kind == "twice":
        return f"line {one} twice", b"".join([*lines[:one + 1], *lines[one:]])
    if kind == "swapped":
        lines[one], lines[other] = lines[other], lines[one]
        return f"lines {one} and {other} swapped", b"".join(lines)
    if kind == "without":
        return f"without line {one}", b"".join([*lines[:one], *lines[one + 1:]])
    if kind == "zeros":
        return f"zeros at {at}", content[:at] + b"\0" * min(512, len(content) - at) + content[at + 512:]
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = random.choice(digits)
    return f"digit {place}", content[:place] + str(random.randrange(10)).encode() + content[place + 1:]

"""What a service finds on disk when it starts.

Recovery takes state.json, or state.json.prev where less is damaged then, and the lines of the journals after it.
What is damaged is left out, kept in a file and reported, and the queue is paused until its owner has looked.  A job
that may have started, as far as is known, is held.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence

from ..formats.state_file import (
    RETIRED,
    STATE_VERSION,
    StateFile,
    decode_old_row,
    decode_row,
    decode_sealed_row,
    is_known,
    read_state,
    read_transaction,
)
from ..machine.disk import STATE_BYTES, Disk, decode_text, find_status, read_whole, remove_file, write_aside
from ..machine.layout import Layout
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError, describe_exception
from ..values.job import PENDING, Job
from ..values.state import EDITABLE, Put, State, change_job
from ..values.text import format_line, join_some, load_json

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


class Recovery:
    """State as the disk has it: of one state file, and the journals after it."""

    def __init__(self, disk: Disk, layout: Layout, path: str) -> None:
        """Raises: OSError; conflict, if a newer nexus wrote the file."""
        self.disk, self.layout, self.state = disk, layout, State()
        self.damage: list[Json] = []                    # what is not whole: {words, found: its JSON, if it is there}
        self.broken: list[str] = []                     # state files that are not whole
        self.source = ""                                # the file that was read; "" for none
        self.doubtful: set[str] = set()                 # jobs of which a change could not be read
        file, name = StateFile(STATE_VERSION, 0, {}, False), os.path.basename(path)
        try:
            file = read_state(decode_text(read_whole(disk, path, STATE_BYTES)))
            self.source = path
        except FileNotFoundError:
            pass
        except (LookupError, TypeError, ValueError) as error:
            self.note_damage(f"{name} is no state file: {format_line(describe_exception(error), 100)}")
        self.is_there = bool(self.source or self.damage)
        self.version = file.version
        for fault in file.faults:
            self.note_damage(f"{name}: {fault}")
        facts = {"facts": file.tables.pop("facts", {})}
        self.put_rows(facts, name, decode_row if file.is_sealed else decode_old_row)
        self.put_rows(file.tables, name, decode_sealed_row if file.is_sealed else decode_old_row)
        self.broken += [path] if self.damage else []
        self.saved_facts = {name: getattr(self.state, name) for name in EDITABLE}
        self.state.seq = self.last = self.checkpoint_seq = file.seq
        self.read_journals(file.is_sealed, path == layout.state_file)
        self.state.next_number = max([self.state.next_number, *(job.number + 1 for job in self.state.jobs.values())])
        self.was_resumed = bool(self.state.damage) and not self.state.paused        # by hand, in the file
        if self.was_resumed:
            self.state.damage = ""

    def note_damage(self, words: str, found: Any = None) -> None:
        self.damage.append({"words": words, "found": found})

    def read_journals(self, is_sealed: bool, is_newest: bool) -> None:
        """Make the changes after the state file's.  `is_newest`: it is state.json, which has the former journal's.

        Raises: OSError.
        """
        path = self.layout.journal_file
        self.is_sealed = is_sealed
        self.lines: set[bytes] = set()                  # the changes made: journal.jsonl may begin with former ones
        self.unreadable: list[str] = []                 # the last lines so far that cannot be read
        self.read_journal(f"{path}.prev")
        self.has_former_lines = self.last > self.checkpoint_seq         # then it must stay for this state file
        if is_newest:
            self.unreadable = []
        self.journal_size = self.read_journal(path)
        if self.unreadable:
            lost = f"its last {'line' if len(self.unreadable) == 1 else f'{len(self.unreadable)} lines'}"
            self.note_damage(f"{os.path.basename(path)}: {lost} cannot be read", self.unreadable)
        if self.source and not find_status(self.disk, path):
            self.note_damage(f"{os.path.basename(path)} is missing")

    def read_journal(self, path: str) -> int:
        """Make the changes of a journal that come next; return the bytes before its last unreadable lines.

        What is missing in journal.jsonl.prev shows in the numbers of the next one.  Raises: OSError.
        """
        import io
        size, at, name = 0, 0, os.path.basename(path)
        needs_crc = self.is_sealed                      # as all lines that follow one with a checksum
        with contextlib.suppress(FileNotFoundError):
            lines = list(io.BytesIO(read_whole(self.disk, path, STATE_BYTES)))
            for number, line in enumerate(lines):
                at += len(line)
                if is_torn(line):
                    continue
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("its end is damaged")
                    seq, tables, is_sealed = read_transaction(line)
                    if needs_crc and not is_sealed and seq > self.checkpoint_seq:
                        raise ValueError("it has no checksum")
                    needs_crc |= is_sealed
                except (ValueError, TypeError, KeyError):
                    if is_unacknowledged(lines[number:], self.last):
                        break
                    self.unreadable.append(line.decode("ascii", "backslashreplace"))
                    self.doubtful.update(guess_jobs(line))
                    continue
                if seq > self.checkpoint_seq and line not in self.lines:
                    if seq != self.last + 1:
                        self.note_damage(f"{name}: after change {self.last} comes change {seq}", self.unreadable)
                    self.put_rows(tables, f"{name}: change {seq}", decode_row if is_sealed else decode_old_row)
                    self.lines.add(line)
                    self.last, self.state.seq = seq, max(self.state.seq, seq)
                size, self.unreadable = at, []
        return size

    def put_rows(self, tables: Mapping[str, Any], where: str, decode_one: Callable[[str, str, Any], Any]) -> None:
        """Put the rows of these tables into State.  A row that cannot be decoded leaves what State had before."""
        for table, rows in tables.items():
            if not isinstance(rows, dict):
                self.note_damage(f"{where}: {table} is no object", rows)
                continue
            for key, row in rows.items():
                if not is_known(table, key) and (decode_one is decode_row or not RETIRED.isdisjoint((table, key))):
                    continue                            # an older or a newer nexus knew it
                try:
                    self.state.put(Put(table, key, decode_one(table, key, row)))
                    self.doubtful.discard(key)
                except (KeyError, TypeError, ValueError) as error:
                    name = f"{'job' if table == 'jobs' else table} {format_line(key, 60)}"
                    fault = f"it has no {error}" if isinstance(error, KeyError) else error
                    self.note_damage(f"{where}: {name} cannot be understood: {fault}", row)
                    if table == "jobs":
                        self.doubtful.add(key)

    def hold_doubtful(self) -> None:
        """Hold the pending jobs that may have started, or may be over, so that none runs twice; and those whose wait,
        for a job that is over or lost, would not end.
        """
        waiting = [job for job in self.state.pending.values() if job.status == PENDING and not job.is_held]
        begun = [job for job in waiting if self.has_begun(job)]
        doubtful = [job for job in waiting if job not in begun
                    and (job.id in self.doubtful or (self.damage and self.was_launched(job)))]
        for jobs, reason in ((begun, "have begun, though they wait here"), (doubtful, "may have changed since")):
            if jobs:
                self.note_damage(f"held, as they {reason} (nexus resume ID): {join_some([job.id for job in jobs])}")
            for job in jobs:
                self.state.put(change_job(job, is_held=True))
        awaited = self.state.live.keys() | self.state.pending.keys()
        orphans = [job for job in self.state.pending.values()
                   if not (awaited.issuperset(job.pending_dependencies)
                           and self.state.awaited.keys() >= {*job.pending_groups})]
        if orphans:
            ids = join_some([job.id for job in orphans])
            self.note_damage(f"held, as what they wait for is over or lost (nexus resume ID): {ids}")
        for job in orphans:
            there = tuple(job_id for job_id in job.pending_dependencies if job_id in awaited)
            groups = tuple(group for group in job.pending_groups if group in self.state.awaited)
            self.state.put(change_job(self.state.jobs[job.id], is_held=True, pending_dependencies=there,
                                      pending_groups=groups))

    def has_begun(self, job: Job) -> bool:
        """Whether the runner of its next attempt has claimed that, so that the change which says so is lost."""
        claim = os.path.join(self.layout.folder_of(job), f"attempt-{job.attempt + 1}")
        status = find_status(self.disk, claim)
        return status is not None and status.st_mtime > job.created_at  # an earlier one is a former job's of this id

    def was_launched(self, job: Job) -> bool:
        """Whether a job.sh was written since its last attempt: one that is slow may still claim the next."""
        status = find_status(self.disk, os.path.join(self.layout.folder_of(job), "job.sh"))
        since = max([job.created_at, *(attempt.finished_at or 0.0 for attempt in job.attempts)])
        return status is not None and status.st_mtime > since

    def pause(self) -> None:
        """Pause the queue for what is damaged."""
        self.state.paused = True
        self.state.damage = format_line(join_some([damaged["words"] for damaged in self.damage], 3, "; "), 500)


def find_recovery(disk: Disk, layout: Layout) -> Recovery:
    """State of the state file from which less is lost; the queue is paused if any is damaged.

    Raises: OSError; conflict, if a newer nexus wrote it.
    """
    newest = chosen = Recovery(disk, layout, layout.state_file)
    if newest.damage or not newest.is_there:
        former = Recovery(disk, layout, f"{layout.state_file}.prev")
        if former.source and (not newest.is_there or len(former.damage) < len(newest.damage)):
            chosen = former
            if newest.broken:
                words = f"{newest.damage[0]['words']} (state.json.prev was read in its place)"
                former.damage.insert(0, {"words": words, "found": None})
        elif former.broken and not newest.source:
            newest.note_damage(f"{former.damage[0]['words']}: the jobs of both are lost")
        chosen.broken = [*newest.broken, *former.broken]
    chosen.hold_doubtful()
    if chosen.damage:
        chosen.pause()
    return chosen


def is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a line, as an interrupted write leaves it: nobody heard that it was accepted."""
    if not re.fullmatch(rb"[ -~]*\0*", line):          # a crash of the machine may leave zeros
        return False
    try:
        read_transaction(line[:-1])
        return line.endswith(b"\0")             # else it is a whole line, whose end is damaged
    except (ValueError, TypeError, KeyError):
        return True


LOST_BLOCK = rb"\0(\0|\{\")"      # one flipped bit makes no two zeros, nor one before a line
LINE_END = rb'"seq":([0-9]{1,15})(?:,"unsynced":([0-9]{1,9}))?,"crc":[0-9]+\}\n$'


def is_unacknowledged(lines: Sequence[bytes], last: int) -> bool:
    """Whether a power cut took the first of these lines, which comes after line `last`, before it was synced.

    Then nobody heard that it was accepted, nor those after it.  What is not synced reaches the disk in any order, and
    what does not is zeros.  A later line must say that it was not on the disk when that one was written, or be cut off
    itself; and none that it was.
    """
    is_told = lines[-1].endswith(b"\0")
    for number, line in enumerate(lines):
        match, is_hole = re.search(LINE_END, line), re.search(LOST_BLOCK, line)
        if not is_hole and (number == 0 or not (match or is_torn(line))):
            return False
        if match:
            seq, unsynced = int(match[1]), int(match[2] or 0)
            if seq - 1 - unsynced > last:
                return False
            is_told |= seq > last + 1
    return is_told


def guess_jobs(line: bytes) -> list[str]:
    """The jobs that a damaged line of the journal seems to be about."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        return list(load_json(line)["put"]["jobs"])
    return []


def keep_aside(disk: Disk, path: str) -> str:
    """Give a file that is about to be replaced another name, or make a copy; return that path.  Raises: OSError."""
    aside = f"{path}.prev.tmp"
    remove_file(disk, aside)
    try:
        disk.link(path, aside)
    except OSError:                         # a file system may have no hard links
        copy_file(disk, path, aside)
    return aside


def make_previous(disk: Disk, aside: str, path: str) -> None:
    """Make PATH.prev what keep_aside() kept.  Raises: OSError."""
    disk.replace(aside, f"{path}.prev")
    remove_file(disk, aside)                # where PATH.prev was the same file already, nothing was renamed


def copy_file(disk: Disk, path: str, target: str) -> None:
    """Make `target` a copy of a file, as a whole.  Raises: OSError, unavailable."""
    aside = f"{target}.new"
    with write_aside(disk, aside, [read_whole(disk, path, STATE_BYTES).decode("utf-8", "surrogateescape")]):
        disk.replace(aside, target)


def is_same_file(disk: Disk, path: str, other: str) -> bool:
    found = [find_status(disk, each) for each in (path, other)]
    first, second = [status and (status.st_dev, status.st_ino) for status in found]
    return first is not None and first == second


def describe_other_machine(name: str, evidence: str, otherwise: str) -> NexusError:
    return NexusError("conflict", f"the service runs on {name} ({evidence})",
                      hint=f"use it there, or set NEXUS_HOME=~/.nexus-$(hostname) or NEXUS_URL; "
                           f"if {name} is gone for good: {otherwise}")

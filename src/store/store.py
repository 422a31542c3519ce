"""The one owner of State: journal and state.json.

A State that others see never changes: changes are made in a copy, which becomes `state` once they are in the
journal, synced.  So nobody sees what the disk may still refuse, and readers never wait.  To copy 10,000 jobs takes
under 1 ms. Each line of journal.jsonl has a number; state.json has the number of the last one that it contains.  It
is written in the background, then the journal begins anew.  The files before stay as state.json.prev and
journal.jsonl.prev. state.json and state.json.prev are two files: what damages one of them in its place must not
damage both. The locks are taken in this order: `saving` (state.json), `committing` (the journal, and `state`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..formats.codec import decode, encode_json
from ..formats.state_file import STATE_VERSION, encode_puts, encode_state, encode_transaction, read_state
from ..machine.clock import Clock
from ..machine.disk import (
    STATE_BYTES,
    Disk,
    append_whole,
    decode_text,
    disk_errors,
    find_files,
    make_folder,
    read_text,
    read_whole,
    stamp_of,
    sync_folder,
    write_aside,
    write_atomic,
)
from ..machine.layout import Layout
from ..machine.processes import find_pid_namespace, is_elsewhere, read_boot_id, read_machine
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import MAX_JOBS, Job
from ..values.state import EDITABLE, Put, State
from ..values.text import format_line, load_json
from .conflicts import Touched, forget_unused, is_next_number, list_status_changes
from .recovery import Recovery, copy_file, describe_other_machine, find_recovery, is_same_file, keep_aside, make_previous

if TYPE_CHECKING:
    import logging
    from typing import Any

DAMAGED = ".damaged-"                       # state.json.damaged-20241024-153020

MIN_JOURNAL_BYTES = 256 * 1024      # a smaller journal is not worth a new state.json


class Journal:
    """journal.jsonl, for appending."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path, self.handle = disk, path, -1      # -1: it is not open
        self.size = 0                                   # of its whole lines
        self.unsynced = 0                               # its last lines that a power cut may still take

    def open(self) -> None:
        """Open it, and cut off what a failed write has left.  Raises: OSError."""
        if self.handle >= 0:
            return
        try:
            self.handle = self.disk.open(self.path, os.O_RDWR | os.O_CREAT)
            self.size = min(self.size, self.disk.size(self.handle))
            self.disk.truncate(self.handle, self.size)
            self.disk.fdatasync(self.handle)                        # also what a killed service has left unsynced
            self.unsynced = 0
            sync_folder(self.disk, os.path.dirname(self.path))      # a power cut must not lose the name
        except BaseException:
            self.close()
            raise

    def append(self, record: bytes, is_synced: bool) -> None:
        """Raises: OSError; then nothing was appended."""
        self.open()
        try:
            append_whole(self.disk, self.handle, record, is_synced)
        except BaseException:
            self.close()                                # nobody knows how much of the line is on the disk
            raise
        self.size += len(record)
        self.unsynced = 0 if is_synced else self.unsynced + 1

    def begin_anew(self, start: int) -> None:
        """Go on in a new file with the lines from byte `start` on; keep the old one.  Raises: OSError."""
        self.open()
        tail = self.disk.pread(self.handle, self.size - start, start)
        with write_aside(self.disk, f"{self.path}.new", [tail.decode("ascii")]) as new:
            make_previous(self.disk, keep_aside(self.disk, self.path), self.path)
            self.disk.replace(new, self.path)
        self.close()
        self.size = len(tail)

    def close(self) -> None:
        if self.handle >= 0:
            self.disk.close(self.handle)
        self.handle = -1


LARGE_TRIES = 3                 # of a transaction beside others


class Store:
    """Keeps State and the disk the same.  Thread-safe."""

    def __init__(self, layout: Layout, clock: Clock, disk: Disk, log: logging.Logger) -> None:
        import threading
        self.layout, self.clock, self.disk, self.log = layout, clock, disk, log
        self.machine_id = read_machine()
        self.state = State()                                # as on the disk; never altered, but replaced
        self.service_id = ""
        self.version = int(clock.now() * 1e6)               # grows with each change that users see, over restarts too
        self.note_status_changes: Callable[[Sequence[Job]], None] = lambda jobs: None       # given the jobs
        self.last_error: NexusError | None = None           # why the last write failed
        self.failed_write: tuple[float, str] | None = None  # (monotonic, the error) of the last one that did
        self.unsettled: Recovery | None = None              # what was recovered, until it is on the disk again
        self.saving, self.committing, self.counting = (threading.Lock() for _ in range(3))
        self.watching: dict[object, list[Put]] = {}         # by each update_large(): what others have changed meanwhile
        self.reserved = 0                                   # the numbers of jobs below may be given out
        self.journal = Journal(disk, layout.journal_file)
        self.stamp: tuple[int, ...] | None = None           # of state.json as last written, or as last taken over
        self.saved_facts: Mapping[str, Any] = {}            # the values of EDITABLE in state.json
        self.bad_edits = 0                                  # how often in a row state.json was no JSON
        self.checkpoint_wanted = threading.Event()
        self.checkpoint_seq = -1                            # of state.json; -1: it must be written anew
        self.is_sound = False                               # state.json is as nexus wrote it: it may become .prev

    def update(self, yield_changes: Callable[[State], Iterable[Put]], is_synced: bool = True) -> Any:
        """Make the changes that `yield_changes` yields, and return what that generator returns.

        Each change is in the State that `yield_changes` was given before it goes on.  Without `is_synced`, a power cut
        before the next change may lose these changes.
        Raises: what `yield_changes` raises; unavailable, if the disk refuses.  Then nothing has changed.
        """
        with self.committing:
            draft = self.state.copy()
            changes, answer = make_changes(draft, yield_changes(draft))
            self.commit(draft, changes, encode_puts(changes), is_synced)
        return answer

    def update_large(self, yield_changes: Callable[[State], Iterable[Put]]) -> Any:
        """As update(), for thousands of changes: they are made in a copy while others go on, who wait only at the end.

        Then what others have changed meanwhile is made in the copy too.  If the two conflict, all is done again; the
        last time by update(), so that it comes to an end.  `yield_changes` may be called several times.
        """
        for _ in range(LARGE_TRIES):
            with self.committing:
                base, theirs, key = self.state, list[Put](), object()
                self.watching[key] = theirs
                # The numbers before are for others' jobs, also those after a large request of another user
                self.reserved = first = max(self.reserved, base.next_number) + 2 * MAX_JOBS
            try:
                draft = base.copy()
                draft.next_number = first
                changes, answer = make_changes(draft, yield_changes(draft))
                puts, ours = encode_puts(changes), Touched(base, changes)
                if not ours.next_number:
                    draft.next_number = base.next_number
                with self.committing:
                    if not ours.conflicts_with(Touched(base, theirs), base):
                        for change in theirs:
                            if not is_next_number(change) or change.value > draft.next_number:
                                draft.put(change)
                        draft.seq = self.state.seq
                        self.commit(draft, changes, puts)
                        return answer
            finally:
                del self.watching[key]
        return self.update(yield_changes)

    def commit(self, draft: State, changes: Sequence[Put], puts: tuple[str, str], is_synced: bool = True) -> None:
        """Make `draft`, with its changes, the State; the caller has `committing`.  Raises: unavailable."""
        if not changes:
            return
        draft.seq += 1
        moves = list_status_changes(self.state, changes)
        self.write(encode_transaction(draft.seq, puts, self.journal.unsynced), is_synced)
        self.state = draft
        for seen in list(self.watching.values()):
            seen += changes
        self.note_change()
        self.note_status_changes(moves)

    def note_change(self) -> None:
        with self.counting:
            self.version += 1

    def write(self, line: str, is_synced: bool) -> None:
        """Append changes to the journal.  Raises: unavailable."""
        error = self.last_error
        if self.unsettled and error:            # what settle() has to keep aside may be in the journal
            raise NexusError(error.kind, error.message, error.hint)
        try:
            with disk_errors("write", self.journal.path):
                self.journal.append(line.encode("ascii"), is_synced)
        except NexusError as error:
            self.note_refusal(error)
            raise
        if self.last_error is not None:
            self.log.info("The journal can be written again")
            self.checkpoint_wanted.set()                    # lines that were not synced before may be lost
        self.last_error = None
        if self.journal.size > max(MIN_JOURNAL_BYTES, self.stamp[1] if self.stamp else 0):
            self.checkpoint_wanted.set()

    def note_refusal(self, error: NexusError) -> None:
        if self.last_error is None:
            self.log.error("%s: nothing new is accepted or started until it can be written", error.message)
        self.last_error = error
        self.note_failed_write(error)

    def note_failed_write(self, error: NexusError) -> None:
        """Of a write, also of other files: who looks an hour later should know."""
        self.failed_write = self.clock.monotonic(), error.message

    def look_for_edit(self, take: Callable[[Mapping[str, Any]], None]) -> bool:
        """Call `take` with the keys of EDITABLE that another program changed in state.json; return whether it did.

        Raises: OSError, and what `take` raises; then the next call tries again.
        """
        with self.saving:
            stamp = stamp_of(self.disk, self.layout.state_file)
            if stamp == self.stamp:
                return False
            try:
                text = read_text(self.disk, self.layout.state_file, STATE_BYTES)
                body = decode("dict", load_json(text)) if text is not None else {}     # a deleted file changes nothing
            except (TypeError, ValueError) as error:
                self.bad_edits += 1
                if self.bad_edits < 3:                      # the other program may still be writing
                    return False
                self.log.warning("state.json was edited and is no JSON (%s): it is written anew", error)
                body = {}
            values = {name: tuple(fact) if isinstance(fact := body[name], list) else fact
                      for name in EDITABLE if name in body}
            edit = {name: value for name, value in values.items() if value != self.saved_facts[name]}
            take(edit)
            self.stamp, self.checkpoint_seq, self.is_sound, self.bad_edits = stamp, -1, False, 0
            self.saved_facts = {**self.saved_facts, **edit}
            self.checkpoint_wanted.set()
            return True

    def save_checkpoint(self) -> None:
        """Write state.json, and begin the journal anew.  Raises: OSError, unavailable; then nothing is lost."""
        path = self.layout.state_file
        with self.saving:
            if not self.unsettled:
                self.update(forget_unused)
            with self.committing:
                state, journal_size = self.state, self.journal.size
            if self.checkpoint_seq == state.seq:
                return
            with write_aside(self.disk, f"{path}.new", encode_state(state)) as new:
                found, stamp = stamp_of(self.disk, path), stamp_of(self.disk, new)      # the stamp survives a renaming
                if found not in (None, self.stamp):
                    self.checkpoint_wanted.set()        # somebody has edited it: take that over first
                    return
                was_sound = self.is_sound and found is not None
                aside = keep_aside(self.disk, path) if was_sound else ""
                self.disk.replace(new, path)
                if was_sound:
                    # Last: so the two are never one file, which one fault would damage
                    make_previous(self.disk, aside, path)
            self.checkpoint_seq, self.is_sound, self.stamp = state.seq, True, stamp
            self.saved_facts = {name: getattr(state, name) for name in EDITABLE}
            # What is not as nexus wrote it never becomes state.json.prev: that and its journal stay until the next time
            if not was_sound and not self.is_usable(f"{path}.prev"):
                copy_file(self.disk, path, f"{path}.prev")
            sync_folder(self.disk, self.layout.journal_dir)
            with self.committing:
                if was_sound:
                    self.journal.begin_anew(journal_size)
                else:
                    self.journal.open()                 # cuts off what could not be read of it

    def is_usable(self, path: str) -> bool:
        """Whether a state file could be recovered from."""
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError, NexusError):
            found = read_state(decode_text(read_whole(self.disk, path, STATE_BYTES)))
            return not found.faults and found.tables["facts"]["host"] == self.machine_id
        return False

    def recover(self) -> None:
        """Read State from the disk.  Raises: conflict, if it is another machine's or a newer nexus's; unavailable.

        Where nothing can be written, State is there to be read; settle() is to be called again.
        """
        state_file = self.layout.state_file
        self.stamp = stamp_of(self.disk, state_file)    # later edits are noticed after the recovery
        make_folder(self.disk, self.layout.journal_dir)
        with disk_errors("read", self.layout.journal_dir):
            found = find_recovery(self.disk, self.layout)
            # As older ones left it, or a crash
            is_one_file = is_same_file(self.disk, state_file, f"{state_file}.prev")
        state = found.state
        # A machine that got another name still has the boot of its jobs; its containers have that boot too.
        namespace = find_pid_namespace()
        is_same_namespace = state.pid_namespace in ("", namespace)             # an older nexus did not write it
        is_this_boot = is_same_namespace and any(
            job.current.boot_id == read_boot_id() for job in state.running.values())
        if state.host and state.running and not is_this_boot and is_elsewhere(self.disk, state.host):
            raise describe_other_machine(
                state.host, f"jobs of {state_file} run there", f"mv {self.layout.home} {self.layout.home}.old")
        self.is_sound = (found.source == state_file and state.host == self.machine_id and not found.damage
                         and is_same_namespace and not found.has_former_lines)
        is_current = self.is_sound and found.version == STATE_VERSION and not is_one_file and not found.was_resumed
        is_id = state.service_id.replace("-", "").isalnum()     # a word in leases; damage may split it
        if not is_id or (is_elsewhere(self.disk, state.host) and not state.live):
            # A copy of ~/.nexus for another machine is another service for the nodes, which would end the other's jobs.
            state.service_id = f"{os.geteuid()}-{self.clock.new_token()[:8]}"
        state.host, state.pid_namespace, self.service_id = self.machine_id, namespace, state.service_id
        if not is_current:                              # a journal of version 2 gets no further line
            for change in forget_unused(state):
                state.put(change)
        self.state, self.saved_facts = state, found.saved_facts
        self.checkpoint_seq, self.journal.size = found.checkpoint_seq if is_current else -1, found.journal_size
        if is_current:
            with contextlib.suppress(NexusError):       # there is no room: then they stay
                self.update(forget_unused, is_synced=False)
            return
        self.unsettled = found
        try:
            self.settle()
        except NexusError as error:
            self.note_refusal(error)
            self.checkpoint_wanted.set()

    def settle(self) -> None:
        """Keep aside what a recovery found damaged, and write state.json anew.  Raises: unavailable."""
        found = self.unsettled
        assert found
        with disk_errors("write", self.layout.journal_dir):
            self.keep_damage(found)
            self.stamp = stamp_of(self.disk, self.layout.state_file)
            self.save_checkpoint()
        self.unsettled = None

    def keep_damage(self, found: Recovery) -> None:
        """Log what is damaged, and keep it, once, in files for a person to look at.  Raises: OSError."""
        at = time.strftime("%Y%m%d-%H%M%S")
        while found.broken:
            aside = f"{found.broken[0]}.broken-{at}"
            copy_file(self.disk, found.broken[0], aside)        # state.json is there until the next one replaces it
            self.log.error("Recovery: %s is kept as %s", found.broken.pop(0), aside)
        for damaged in found.damage:
            self.log.error("Recovery: %s", format_line(damaged["words"], 300))
        if found.damage:
            path = f"{self.layout.state_file}{DAMAGED}{at}"
            write_atomic(self.disk, path, (f"{encode_json(damaged)}\n" for damaged in found.damage))
            self.log.error("Recovery: the queue is paused; what cannot be understood is kept in %s", path)
            found.damage = []

    def list_damaged(self) -> list[str]:
        """The files of keep_damage() that are still there."""
        return find_files(self.disk, f"{self.layout.state_file}{DAMAGED}")


def make_changes(draft: State, decided: Iterable[Put]) -> tuple[list[Put], Any]:
    """Make changes in `draft`; return what has become of each row, and what the generator returned."""
    rows: dict[tuple[str, str], Put] = {}
    changes = iter(decided)
    while True:
        try:
            change = next(changes)
        except StopIteration as end:
            return list(rows.values()), end.value
        draft.put(change)
        rows[change.table, change.key] = change

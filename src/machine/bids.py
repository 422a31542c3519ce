"""The files in which the services of a box's users tell each other what they want: in the folder of the leases.

A bid is a file of a service's own.  It counts for the user who owns it, whatever its name, and only while a process
that may write it guards it: a service that has ended says nothing any more.  Others can put anything there.  So a file
is read up to a limit, and only if it is guarded; a name is looked at once; nobody has more than a few; and no link is
followed, and nothing is waited for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from ..formats.codec import decode_value, encode_json
from ..values.bid import Bid
from ..values.text import load_json
from ..values.value import Value, replace
from .disk import Disk, find_user, write_at

PREFIX, NEW_PREFIX = "bid-", "new-bid-"
BID_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
BID_BYTES = 16384
MAX_BIDS_OF_USER = 4
MAX_BIDS = 256
MAX_NEW_NAMES = 500             # that one look at the folder judges
CROWDED_NAMES = 2000            # a folder of more is read only now and then: LIST_INTERVAL_S
LIST_INTERVAL_S = 1.0
LIST_SETTLED_S = 1.0            # a folder that changed so long ago has another time when it changes again
HUNG_S = 10.0                   # a service writes its bid each second while others have one
LITTER_S = 60.0                 # a file that was never finished


class FoundBid(Value):
    """The bid of another service, as it was read last."""
    handle: int
    uid: int
    user: str                                   # the name of uid
    changed_ns: int = -1                        # the file's time then
    changed_at: float = 0.0                     # UTC epoch seconds: when it was seen to change last
    bid: Bid = Bid()


class Bids:
    """This service's bid, and those of others."""

    def __init__(self, disk: Disk, folder: str, uid: int, new_token: Callable[[], str]) -> None:
        self.disk, self.folder, self.uid, self.new_token = disk, folder, uid, new_token
        self.own: tuple[str, int] | None = None     # (name, handle) of the own bid
        self.told = b""                             # what is in it
        self.others: dict[str, FoundBid] = {}       # {name: bid}
        self.judged: set[str] = set()               # names of files that are none
        self.listed_ns = -1                         # the folder's time when it was listed last
        self.listed_at = float("-inf")
        self.is_crowded = False

    def tell(self, bid: Bid) -> None:
        """Write the own bid; what did not change has a new time.  Raises: OSError."""
        content = encode_json(bid).encode()
        if len(content) > BID_BYTES:                # no box has so many GPUs
            return
        if self.own and not self.disk.stat(self.own[1]).st_nlink:       # somebody cleans the folder up
            self.withdraw()
        if self.own is None:
            self.own = self.open_own()
        _, handle = self.own
        if content == self.told:
            self.disk.touch(handle)
        else:                                       # it never gets shorter: spaces mean nothing in JSON
            write_at(self.disk, handle, content.ljust(len(self.told)), 0)
            self.told = content.ljust(len(self.told))

    def open_own(self) -> tuple[str, int]:
        """A new file for the own bid.  It has its name only when it is guarded: nobody takes it for a dead one."""
        token = self.new_token()[:16]
        name, path, aside = PREFIX + token, f"{self.folder}/{PREFIX}{token}", f"{self.folder}/{NEW_PREFIX}{token}"
        handle = self.disk.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            self.disk.guard(handle)
            self.disk.chmod(handle, 0o644)
            self.disk.replace(aside, path)
        except BaseException:
            self.disk.close(handle)
            raise
        self.told = b""
        return name, handle

    def withdraw(self) -> None:
        """Say nothing any more."""
        if self.own:
            name, handle = self.own
            self.own = None
            with contextlib.suppress(OSError):
                self.disk.unlink(f"{self.folder}/{name}")
            self.disk.close(handle)

    def look(self, now: float) -> list[FoundBid]:
        """The bids of others that count now; `now` in UTC epoch seconds."""
        self.list_folder(now)
        for name, found in list(self.others.items()):
            if self.disk.is_guarded(found.handle):
                self.others[name] = self.read(found, now)
            else:
                self.forget(name)
        return [found for found in self.others.values() if now - found.changed_at <= HUNG_S]

    def list_folder(self, now: float) -> None:
        """Look for new names, if the folder has changed."""
        try:
            changed_ns = self.disk.stat(self.folder).st_mtime_ns
            is_due = changed_ns != self.listed_ns and (not self.is_crowded or now - self.listed_at > LIST_INTERVAL_S)
            names = self.disk.listdir(self.folder) if is_due else []
        except OSError:                             # nobody has made it yet
            return
        if not is_due:
            return
        self.is_crowded, self.listed_at = len(names) > CROWDED_NAMES, now
        found = [name for name in names if name.startswith((PREFIX, NEW_PREFIX))]
        self.judged.intersection_update(found)
        new = [name for name in found if name not in self.judged and name not in self.others]
        for name in new[:MAX_NEW_NAMES]:
            self.judge(name, now)
        # Else the others are judged at the next look; or what comes in the same tick of a clock would never be seen.
        if len(new) <= MAX_NEW_NAMES and abs(now - changed_ns / 1e9) > LIST_SETTLED_S:
            self.listed_ns = changed_ns

    def judge(self, name: str, now: float) -> None:
        """Take a file for a service's bid, or never look at it again."""
        if self.own and name == self.own[0]:
            return
        self.judged.add(name)
        with contextlib.suppress(OSError):          # it has gone, or its owner keeps others out
            status = self.disk.stat(f"{self.folder}/{name}", is_followed=False)
            uid = status.st_uid
            is_full = sum(found.uid == uid for found in self.others.values()) >= MAX_BIDS_OF_USER
            if not stat.S_ISREG(status.st_mode) or is_full or len(self.others) >= MAX_BIDS:
                return
            handle = self.disk.open(f"{self.folder}/{name}", BID_FLAGS)
            is_same = os.path.samestat(self.disk.stat(handle), status)
            if is_same and name.startswith(PREFIX) and self.disk.is_guarded(handle):
                self.judged.discard(name)
                self.others[name] = self.read(FoundBid(handle, uid, find_user(uid), changed_at=status.st_mtime), now)
                return
            self.disk.close(handle)
            if uid == self.uid and not now - status.st_mtime <= LITTER_S:
                self.disk.unlink(f"{self.folder}/{name}")

    def read(self, found: FoundBid, now: float) -> FoundBid:
        """Another service's bid as it is now.  What is none leaves it as it was."""
        changed_ns = self.disk.stat(found.handle).st_mtime_ns
        if changed_ns == found.changed_ns:
            return found
        bid = found.bid
        with contextlib.suppress(ValueError, TypeError, RecursionError):        # or it is being written
            content = self.disk.pread(found.handle, BID_BYTES + 1, 0)
            bid = decode_value(Bid, load_json(content[:BID_BYTES].decode()))
        changed_at = now if found.changed_ns >= 0 else min(now, found.changed_at)
        return replace(found, changed_ns=changed_ns, changed_at=changed_at, bid=bid)

    def forget(self, name: str) -> None:
        self.disk.close(self.others.pop(name).handle)
        self.judged.add(name)

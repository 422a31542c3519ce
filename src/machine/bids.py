"""The files in which the services of a box's users tell each other what they want: in the folder of the leases.

A bid is a file of a service's own.  It counts for the user who owns it, whatever its name, and only while a process
guards it that may write it, as nobody but its owner may: a service that has ended says nothing any more.  Others can
put anything there, and rename what is there if the folder is theirs.  So a file is read up to a limit, and only if it
is guarded; one counts once, whatever names it has, and nobody has more than a few; no link is followed, and nothing is
waited for.  What makes much work is looked at more seldom: all of that takes a thirtieth of the time at most.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat

from ..formats.codec import decode_value, encode_json
from ..opening import TYPE_CHECKING
from ..values.bid import Bid
from ..values.text import load_json
from ..values.value import Value, replace
from .clock import Clock
from .disk import Disk, decode_text, find_user, is_machine_fault, open_file, read_whole, write_at

if TYPE_CHECKING:
    FileId = tuple[int, int]            # of the file system, and there

PREFIX, NEW_PREFIX = "bid-", "new-bid-"
BID_NAME = re.compile(f"({NEW_PREFIX}|{PREFIX})[0-9a-f]{{16}}")
BID_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
BID_BYTES = 16384
BID_PARTS = 500                 # commas in it: what it says of 16 GPUs has some 250
MAX_BIDS_OF_USER = 4
MAX_BIDS = 256
MAX_NEW_NAMES = 200             # that one look at the folder judges
MAX_PASSED = 10000              # names that are judged before those that come later
PAUSE_FACTOR = 30               # what took so long is not done again for so many times as long
MAX_READING_S = 0.002           # that one look spends on bids which have changed, but for the last of them
RACE_S = 0.1                    # a folder that changed so shortly before may change again at the same time
HUNG_S = 10.0                   # a service writes its bid each second while others have one
LITTER_S = 60.0                 # a file that was never finished
SUBUID_FILE, SUBUID_BYTES = "/etc/subuid", 2**20


class OwnBid(Value):
    """The file of the own bid."""
    path: str
    handle: int
    file: FileId


class FoundBid(Value):
    """The bid of another service, as it was read last."""
    handle: int
    file: FileId
    uid: int
    user: str                                   # the name of uid
    changed_ns: int = -1                        # the file's time then
    changed_at: float = 0.0                     # UTC epoch seconds: when it was seen to change last
    read_at: float = float("-inf")              # monotonic: when it was read last
    bid: Bid = Bid()


class Bids:
    """This service's bid, and those of others."""

    def __init__(self, disk: Disk, folder: str, uid: int, clock: Clock) -> None:
        self.disk, self.folder, self.uid, self.clock = disk, folder, uid, clock
        self.own: OwnBid | None = None
        self.told = b""                             # what is in it
        self.others: dict[str, FoundBid] = {}       # {name: bid}
        self.judged: set[str] = set()               # names of files that are none
        self.surplus: set[str] = set()              # those of them that may be one when a user has fewer
        self.passed: set[str] = set()               # names that were there and not judged yet
        self.listed: tuple[int, ...] = ()           # what the folder was when it was listed last
        self.list_at = float("-inf")                # monotonic: it is not listed again before
        self.reading_s = MAX_READING_S              # that may be spent on bids which have changed
        self.reading_at = float("-inf")             # monotonic: when this was so much
        self.accounts: dict[int, tuple[int, str]] = {}          # {uid: find_account()}

    def tell(self, bid: Bid) -> None:
        """Write the own bid; what did not change has a new time.  Raises: OSError."""
        content = encode_json(bid).encode()
        while is_too_long(content) and bid.wants:           # cards with many slices: the last of the queue are left out
            bid = replace(bid, wants=bid.wants[:-1])
            content = encode_json(bid).encode()
        if self.own and not self.is_there(self.own):        # somebody cleans the folder up
            self.withdraw()
        own = self.own = self.own or self.open_own()
        content = content.ljust(len(self.told))             # it never gets shorter: spaces mean nothing in JSON
        if content == self.told:
            self.disk.touch(own.handle)
            return
        try:
            write_at(self.disk, own.handle, content, 0)
        except OSError:                                     # a part may be there
            self.withdraw()
            raise
        self.told = content

    def is_there(self, own: OwnBid) -> bool:
        """Whether the own bid still has its name in the folder."""
        with contextlib.suppress(OSError):
            return identify(self.disk.stat(own.path, is_followed=False)) == own.file
        return False

    def open_own(self) -> OwnBid:
        """A new file for the own bid.  It has its name only when it is guarded: nobody takes it for a dead one."""
        import errno
        token = self.clock.new_token()[:16]
        path, aside = f"{self.folder}/{PREFIX}{token}", f"{self.folder}/{NEW_PREFIX}{token}"
        handle = self.disk.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            if not self.disk.guard(handle):
                raise OSError(errno.EAGAIN, "it cannot be locked", aside)
            self.disk.chmod(handle, 0o644)
            self.disk.replace(aside, path)
            own = OwnBid(path, handle, identify(self.disk.stat(handle)))
        except BaseException:
            self.disk.close(handle)
            with contextlib.suppress(OSError):
                self.disk.unlink(aside)
            raise
        self.told = b""
        return own

    def withdraw(self) -> None:
        """Say nothing any more."""
        own, self.own = self.own, None
        if own:
            with contextlib.suppress(OSError):
                if self.is_there(own):
                    self.disk.unlink(own.path)
            self.disk.close(own.handle)

    def look(self, now: float) -> list[FoundBid]:
        """The bids of others that count now; `now` in UTC epoch seconds."""
        at = self.clock.monotonic()
        self.reading_s = min(MAX_READING_S, self.reading_s + (at - self.reading_at) / PAUSE_FACTOR)
        self.reading_at = at
        for name, found in sorted(self.others.items(), key=lambda item: item[1].read_at):
            try:
                is_told = self.disk.is_guarded(found.handle)
                if is_told:
                    self.others[name] = self.read(found, now)
            except OSError:
                is_told = False
            if not is_told:
                self.forget(name)
        self.list_folder(now)
        return [found for found in self.others.values() if now - found.changed_at <= HUNG_S and found.bid != Bid()]

    def list_folder(self, now: float) -> None:
        """Look for new names, if the folder has changed."""
        began = self.clock.monotonic()
        with contextlib.suppress(OSError):          # nobody has made it yet
            status = self.disk.stat(self.folder, is_followed=False)
            stamp = (*identify(status), status.st_ctime_ns)         # its owner can set its other times
            if stamp == self.listed or began < self.list_at:
                return
            with open_file(self.disk, self.folder, os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
                found = [name for name in self.disk.listdir(folder) if BID_NAME.fullmatch(name)]
                self.judged.intersection_update(found)
                new = [name for name in found if name not in self.judged and name not in self.others]
                new.sort(key=lambda name: name not in self.passed)          # who makes ever more of them stops nobody
                self.passed = set(new[MAX_NEW_NAMES:MAX_PASSED])
                is_settled = not self.passed and abs(now - status.st_ctime_ns / 1e9) > RACE_S
                self.listed = stamp if is_settled else ()
                for name in new[:MAX_NEW_NAMES]:
                    self.judge(folder, name, now)
            ended = self.clock.monotonic()
            self.list_at = ended + PAUSE_FACTOR * (ended - began)

    def judge(self, folder: int, name: str, now: float) -> None:
        """Take a file for a service's bid, or never look at it again."""
        self.judged.add(name)
        try:
            status = self.disk.stat(name, folder, is_followed=False)
            if not name.startswith(NEW_PREFIX):
                if self.may_be_bid(name, status):
                    self.take(folder, name, status, now)
            elif status.st_uid == self.uid and not now - status.st_mtime <= LITTER_S:
                self.disk.unlink(name, folder)
        except OSError as error:                    # it has gone, or its owner keeps others out
            if is_machine_fault(error):
                self.judged.discard(name)
                self.listed = ()

    def may_be_bid(self, name: str, status: os.stat_result) -> bool:
        """Whether a file is worth opening.  What others may write, they could guard in its owner's place."""
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            return False
        others = [found.file for found in self.others.values()]
        if identify(status) in others or (self.own and identify(status) == self.own.file):
            return False                            # another name of it
        uid, _ = self.find_account(status.st_uid)
        if len(others) < MAX_BIDS and sum(found.uid == uid for found in self.others.values()) < MAX_BIDS_OF_USER:
            return True
        self.surplus.add(name)
        return False

    def take(self, folder: int, name: str, status: os.stat_result, now: float) -> None:
        """Open a file, and keep it if it is a bid.  Raises: OSError."""
        handle = self.disk.open(name, BID_FLAGS, folder=folder)
        try:
            if identify(self.disk.stat(handle)) != identify(status):        # somebody has just exchanged it
                return
            if self.disk.is_guarded(handle):
                uid, user = self.find_account(status.st_uid)
                found = FoundBid(handle, identify(status), uid, user, changed_at=status.st_mtime)
                self.others[name] = self.read(found, now)
                self.judged.discard(name)
            elif status.st_uid == self.uid:         # a service that was killed has left it
                self.disk.unlink(name, folder)
        finally:
            if name not in self.others:
                self.close(handle)

    def close(self, handle: int) -> None:
        """Close a file that is not kept.  To close the own bid, had somebody put it there, would have unlocked it."""
        is_own = self.own and identify(self.disk.stat(handle)) == self.own.file
        self.disk.close(handle)
        if is_own:
            self.withdraw()

    def find_account(self, uid: int) -> tuple[int, str]:
        """find_account(), which is asked once for each uid: it may take long."""
        if uid not in self.accounts:
            if len(self.accounts) >= MAX_BIDS:
                self.accounts.clear()
            self.accounts[uid] = find_account(self.disk, uid)
        return self.accounts[uid]

    def read(self, found: FoundBid, now: float) -> FoundBid:
        """Another service's bid as it is now.  What is none leaves it as it was.  Raises: OSError."""
        began, changed_ns = self.clock.monotonic(), self.disk.stat(found.handle).st_mtime_ns
        if changed_ns == found.changed_ns or (self.reading_s <= 0.0 and found.changed_ns >= 0):
            return found
        bid = found.bid
        with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):     # or it is being written
            content = self.disk.pread(found.handle, BID_BYTES, 0)
            bid = bid if is_too_long(content) else decode_value(Bid, load_json(content.decode()))
        changed_at, ended = now if found.changed_ns >= 0 else min(now, found.changed_at), self.clock.monotonic()
        self.reading_s -= ended - began
        return replace(found, changed_ns=changed_ns, changed_at=changed_at, bid=bid, read_at=ended)

    def forget(self, name: str) -> None:
        """Its service has ended: its place is another's."""
        with contextlib.suppress(OSError):
            self.disk.close(self.others.pop(name).handle)
        self.judged -= self.surplus
        self.surplus, self.listed = set(), ()


def is_too_long(content: bytes) -> bool:
    return len(content) > BID_BYTES or content.count(b",") > BID_PARTS


def identify(status: os.stat_result) -> FileId:
    """What no other file has, whatever its name."""
    return status.st_dev, status.st_ino


SUBUID_ROW = re.compile(r"^([^:\n]+):(\d{1,10}):(\d{1,10})$", re.MULTILINE)


def find_account(disk: Disk, uid: int) -> tuple[int, str]:
    """(uid, name) of the user whom a uid belongs to.

    Of those without an account a user may have thousands, for containers: these count as that user.  Source: subuid(5).
    """
    import pwd
    with contextlib.suppress(KeyError):
        return uid, pwd.getpwuid(uid).pw_name
    with contextlib.suppress(OSError, KeyError):
        text = decode_text(read_whole(disk, SUBUID_FILE, SUBUID_BYTES), "replace")
        for owner, first, count in SUBUID_ROW.findall(text):
            if 0 <= uid - int(first) < int(count):
                found = int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
                return found, find_user(found)
    return uid, find_user(uid)

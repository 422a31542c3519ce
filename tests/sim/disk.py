"""A disk that is a value: it keeps what was synced, and may lose, tear or reorder what was not."""
from __future__ import annotations

import errno
import os
import random
import stat
from typing import TYPE_CHECKING, Any, Callable

import nexus

if TYPE_CHECKING:
    from world import SimProcess

BLOCK = 512             # bytes that a disk writes as one


class Status:
    """The part of an os.stat_result that nexus looks at."""

    def __init__(self, file: File) -> None:
        self.st_ino, self.st_dev, self.st_uid, self.st_nlink = file.number, 1, file.uid, file.links
        self.st_mode = file.mode | (stat.S_IFDIR if file.is_folder else stat.S_IFREG)
        self.st_size, self.st_mtime_ns = len(file.content), file.changed_ns
        self.st_mtime = file.changed_ns / 1e9
        self.st_ctime_ns = file.changed_ns


class File:
    """A file or a folder, with what of it is sure to survive a power cut."""

    def __init__(self, number: int, mode: int, is_folder: bool, uid: int) -> None:
        self.number, self.mode, self.is_folder, self.uid, self.links, self.changed_ns = number, mode, is_folder, uid, 1, 0
        self.content, self.synced = bytearray(), b""
        self.writes: list[tuple[int, bytes | None]] = []        # since then: (at, what); None: cut off there
        self.names: dict[str, File] = {}                        # of a folder
        self.synced_names: dict[str, File] = {}
        self.renames: list[dict[str, File | None]] = []         # since then, each as one
        self.locks: dict[OpenFile, bool] = {}                   # {who has it open: whether the lock is shared}
        self.guard: SimProcess | None = None                    # which has a lock on it as a process

    def sync(self) -> None:
        self.synced, self.writes = bytes(self.content), []
        self.synced_names, self.renames = dict(self.names), []

    def cut_power(self, rnd: random.Random) -> None:
        """Become what the disk has kept: all that was synced, and of the rest whatever chance says."""
        kept = rnd.randint(0, len(self.renames))
        for changes in self.renames[:kept]:                     # file systems keep the order of names in one folder
            put_names(self.synced_names, changes)
        self.names, content, way = dict(self.synced_names), bytearray(self.synced), rnd.randrange(3)
        for at, piece in self.writes:
            if way == 0 or (way == 1 and rnd.random() < 0.5):   # lost; or some are, in any order
                continue
            if piece is None:
                del content[at:]
                continue
            if rnd.random() < 0.3:                              # torn: the length is there, and not all blocks
                piece = piece[:rnd.randint(0, len(piece))].ljust(len(piece), b"\0")
            put_bytes(content, at, piece)
        self.content, self.locks, self.guard = content, {}, None
        self.sync()


def put_names(names: dict[str, File], changes: dict[str, File | None]) -> None:
    for name, file in changes.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def put_bytes(content: bytearray, at: int, piece: bytes) -> None:
    if at > len(content):
        content.extend(bytes(at - len(content)))
    content[at:at + len(piece)] = piece


class OpenFile:
    """What an open() has made.  Several handles, of several processes, may be of one."""

    def __init__(self, file: File) -> None:
        self.file, self.at, self.handles = file, 0, 0

    def release(self) -> None:
        self.handles -= 1
        if not self.handles:
            self.file.locks.pop(self, None)


class FileSystem:
    """The files of one machine."""

    def __init__(self, get_time: Callable[[], float]) -> None:
        self.get_time, self.last_number = get_time, 1
        self.root = File(1, 0o755, True, os.geteuid())
        self.is_full, self.is_read_only = False, False

    def make(self, mode: int, is_folder: bool, uid: int) -> File:
        self.last_number += 1
        file = File(self.last_number, mode, is_folder, uid)
        file.changed_ns = self.now_ns()
        return file

    def now_ns(self) -> int:
        return int(self.get_time() * 1e9)

    def apply(self, folder: File, changes: dict[str, File | None]) -> None:
        """Give or take names in a folder, as one change."""
        put_names(folder.names, changes)
        folder.renames.append(changes)
        folder.changed_ns = self.now_ns()

    def find(self, path: str, start: File | None = None) -> File:
        """Raises: OSError."""
        file = start or self.root
        for name in path.split("/"):
            if not name or name == ".":
                continue
            if not file.is_folder:
                raise fault(errno.ENOTDIR, path)
            found = file.names.get(name)
            if found is None:
                raise fault(errno.ENOENT, path)
            file = found
        return file

    def find_place(self, path: str, start: File | None = None) -> tuple[File, str]:
        """(the folder of a path, the name in it).  Raises: OSError."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return self.find(folder, start), name

    def check_writable(self, path: str, takes_room: bool = False) -> None:
        """Raises: OSError."""
        if self.is_read_only:
            raise fault(errno.EROFS, path)
        if takes_room and self.is_full:
            raise fault(errno.ENOSPC, path)

    def walk(self) -> list[tuple[str, File]]:
        """All files, with their paths."""
        found, todo = [], [("", self.root)]
        while todo:
            path, file = todo.pop()
            found.append((path or "/", file))
            todo += [(f"{path}/{name}", inner) for name, inner in sorted(file.names.items(), reverse=True)]
        return found

    def cut_power(self, rnd: random.Random) -> None:
        todo, seen = [self.root], set[int]()
        while todo:
            file = todo.pop()
            if file.number not in seen:
                seen.add(file.number)
                file.cut_power(rnd)
                todo += file.names.values()
        for _, file in self.walk():
            file.links = 0
        for _, file in self.walk():
            file.links += 1


def fault(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class SimDisk(nexus.Disk):
    """The files of a machine as one process sees them.  Each operation that changes something may be its last."""

    def __init__(self, process: SimProcess) -> None:
        self.process = process

    @property
    def files(self) -> FileSystem:
        return self.process.host.files

    def see(self) -> None:
        """A dead process does nothing more."""
        self.process.check_alive()

    def change(self, path: object, takes_room: bool = False) -> None:
        """Raises: OSError; Crash, where this is the operation at which the process is killed."""
        self.process.count_effect()
        self.files.check_writable(str(path), takes_room)

    def get(self, handle: int, path: object = "") -> OpenFile:
        found = self.process.handles.get(handle)
        if found is None:
            raise fault(errno.EBADF, path or handle)
        return found

    def look_up(self, file: str | int, folder: int | None = None) -> File:
        if isinstance(file, int):
            return self.get(file).file
        return self.files.find(file, self.get(folder).file if folder is not None else None)

    def open(self, path: str, flags: int, mode: int = 0o600, folder: int | None = None) -> int:
        self.see()
        start = self.get(folder).file if folder is not None else None
        place, name = self.files.find_place(path, start)
        file = place.names.get(name) if name else place
        if file is None and flags & os.O_CREAT:
            self.change(path, takes_room=True)
            if not place.is_folder:
                raise fault(errno.ENOTDIR, path)
            file = self.files.make(mode, False, self.process.uid)
            self.files.apply(place, {name: file})
        elif file is None:
            raise fault(errno.ENOENT, path)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise fault(errno.EEXIST, path)
        elif flags & os.O_DIRECTORY and not file.is_folder:
            raise fault(errno.ENOTDIR, path)
        elif file.is_folder and flags & (os.O_WRONLY | os.O_RDWR):
            raise fault(errno.EISDIR, path)
        elif flags & (os.O_WRONLY | os.O_RDWR):
            self.files.check_writable(path)
        if flags & os.O_TRUNC:
            self.cut(file, 0)
        return self.process.add_handle(OpenFile(file))

    def close(self, handle: int) -> None:
        opened = self.process.handles.pop(handle, None)
        if opened:
            opened.release()
            self.drop_guard(opened.file)

    def drop_guard(self, file: File) -> None:
        """A process that closes a file loses its lock, also where it has that open once more: see fcntl(2)."""
        if file.guard is self.process:
            file.guard = None

    def read(self, handle: int, count: int) -> bytes:
        self.see()
        opened = self.get(handle)
        if opened.file.is_folder:
            raise fault(errno.EISDIR, handle)
        piece = bytes(opened.file.content[opened.at:opened.at + count])
        opened.at += len(piece)
        return piece

    def pread(self, handle: int, count: int, at: int) -> bytes:
        self.see()
        opened = self.get(handle)
        if opened.file.is_folder:
            raise fault(errno.EISDIR, handle)
        return bytes(opened.file.content[at:at + count])

    def pwrite(self, handle: int, content: bytes, at: int) -> int:
        file = self.get(handle).file
        self.process.count_effect()
        if self.files.is_read_only:
            raise fault(errno.EROFS, handle)
        if self.files.is_full and at + len(content) > len(file.content):
            room = max(0, -len(file.content) % BLOCK)           # the rest of its last block is there
            content = content[:room]
            if not content:
                raise fault(errno.ENOSPC, handle)
        put_bytes(file.content, at, content)
        file.writes.append((at, content))
        file.changed_ns = self.files.now_ns()
        return len(content)

    def size(self, handle: int) -> int:
        self.see()
        return len(self.get(handle).file.content)

    def cut(self, file: File, size: int) -> None:
        file.content[size:] = bytes(max(0, size - len(file.content)))
        file.writes.append((size, None))
        file.changed_ns = self.files.now_ns()

    def truncate(self, handle: int, size: int) -> None:
        self.change(handle)
        self.cut(self.get(handle).file, size)

    def fsync(self, handle: int) -> None:
        self.process.count_effect()
        self.get(handle).file.sync()

    def fdatasync(self, handle: int) -> None:
        self.fsync(handle)

    def renumber(self, handle: int, least: int) -> int:
        self.see()
        opened = self.process.handles.pop(handle)
        opened.handles -= 1
        self.drop_guard(opened.file)
        return self.process.add_handle(opened, least)

    def lock(self, handle: int, is_shared: bool = False, waits: bool = False) -> bool:
        self.see()
        opened = self.get(handle)
        locks = opened.file.locks
        if locks.get(opened) is is_shared:
            return True
        locks.pop(opened, None)             # to change a lock is to drop it first: see flock(2)
        if any(not (is_shared and other) for other in locks.values()):
            return False
        locks[opened] = is_shared
        return True

    def guard(self, handle: int) -> bool:
        self.see()
        file = self.get(handle).file
        if file.guard not in (None, self.process):
            return False
        file.guard = self.process
        return True

    def is_guarded(self, handle: int) -> bool:
        self.see()
        file = self.get(handle).file
        self.drop_guard(file)               # to ask is to take the lock, and to give it back
        return file.guard is not None

    def stat(self, file: str | int, folder: int | None = None, is_followed: bool = True) -> Any:
        self.see()
        return Status(self.look_up(file, folder))

    def can_read(self, path: str) -> bool:
        self.see()
        return True

    def chmod(self, file: str | int, mode: int) -> None:
        self.change(file)
        self.look_up(file).mode = mode & 0o7777

    def touch(self, file: str | int) -> None:
        self.change(file)
        self.look_up(file).changed_ns = self.files.now_ns()

    def link(self, path: str, other: str) -> None:
        self.change(other, takes_room=True)
        file, (folder, name) = self.files.find(path), self.files.find_place(other)
        if name in folder.names:
            raise fault(errno.EEXIST, other)
        file.links += 1
        self.files.apply(folder, {name: file})

    def replace(self, path: str, other: str) -> None:
        self.change(other)
        (folder, name), (target, new_name) = self.files.find_place(path), self.files.find_place(other)
        if name not in folder.names:
            raise fault(errno.ENOENT, path)
        file, former = folder.names[name], target.names.get(new_name)
        if file is former:
            return                          # two names of one file: rename() does nothing
        if former and former.is_folder and former.names:
            raise fault(errno.ENOTEMPTY, other)
        if former:
            former.links -= 1
        if folder is target:
            self.files.apply(folder, {name: None, new_name: file})
        else:
            self.files.apply(folder, {name: None})
            self.files.apply(target, {new_name: file})

    def unlink(self, path: str, folder: int | None = None) -> None:
        self.see()
        place, name = self.files.find_place(path, self.get(folder).file if folder is not None else None)
        if name not in place.names:
            raise fault(errno.ENOENT, path)
        if place.names[name].is_folder:
            raise fault(errno.EISDIR, path)
        self.change(path)
        place.names[name].links -= 1
        self.files.apply(place, {name: None})

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        self.see()
        place, name = self.files.find_place(path)
        if name in place.names:
            raise fault(errno.EEXIST, path)
        self.change(path, takes_room=True)
        self.files.apply(place, {name: self.files.make(mode, True, self.process.uid)})

    def makedirs(self, path: str, mode: int = 0o700) -> None:
        self.see()
        at = ""
        for name in path.strip("/").split("/"):
            at += f"/{name}"
            try:
                self.mkdir(at, mode)
            except FileExistsError:
                if not self.files.find(at).is_folder:
                    raise

    def rmdir(self, path: str) -> None:
        self.see()
        place, name = self.files.find_place(path)
        if name not in place.names:
            raise fault(errno.ENOENT, path)
        if place.names[name].names:
            raise fault(errno.ENOTEMPTY, path)
        self.change(path)
        self.files.apply(place, {name: None})

    def listdir(self, folder: str | int) -> list[str]:
        self.see()
        file = self.look_up(folder)
        if not file.is_folder:
            raise fault(errno.ENOTDIR, folder)
        return list(file.names)

    def realpath(self, path: str) -> str:
        return os.path.normpath(path)

    def statvfs(self, path: str) -> Any:
        self.see()
        self.files.find(path)
        return Room(self.files.is_full)


class Room:
    """The part of an os.statvfs_result that nexus looks at."""

    def __init__(self, is_full: bool) -> None:
        self.f_bavail = self.f_bfree = 0 if is_full else 10**7
        self.f_blocks, self.f_frsize, self.f_bsize, self.f_favail, self.f_files, self.f_ffree = (
            10**8, 4096, 4096, 10**6, 10**7, 10**6)

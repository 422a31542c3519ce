"""Writing that survives a crash, reading what may be torn.

A file that must be complete is written aside, synced, and renamed.  System errors become `unavailable` here. The
functions are made of the operations of Disk, which is handed to them: so a simulation can have a disk of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from ..formats.codec import decode
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import format_line, format_memory, load_json, refuse

if TYPE_CHECKING:
    from typing import Any

    from .layout import Layout


class Disk:
    """The files of this machine; a handle is that of an open file.  All operations raise OSError, as those of `os`.

    /proc is the kernel's, and pipes and sockets hold nothing: they are no part of it.
    """

    def open(self, path: str, flags: int, mode: int = 0o600, folder: int | None = None) -> int:
        """A handle, which children do not inherit.  `folder`: the handle of the folder in which `path` is."""
        return os.open(path, flags, mode, dir_fd=folder)

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, handle: int, count: int) -> bytes:
        """The next bytes, at most so many; at the end none."""
        return os.read(handle, count)

    def pread(self, handle: int, count: int, at: int) -> bytes:
        """Bytes from byte `at` on, at most so many."""
        return os.pread(handle, count, at)

    def pwrite(self, handle: int, content: bytes, at: int) -> int:
        """Write from byte `at` on; return how many bytes were written, which may be fewer."""
        return os.pwrite(handle, content, at)

    def size(self, handle: int) -> int:
        """The bytes of the file; the next read() is at its end."""
        return os.lseek(handle, 0, os.SEEK_END)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def fsync(self, handle: int) -> None:
        """Put the file, or the names in a folder, where a power cut does not reach them."""
        os.fsync(handle)

    def fdatasync(self, handle: int) -> None:
        """fsync() without the times of the file."""
        os.fdatasync(handle)

    def renumber(self, handle: int, least: int) -> int:
        """The same open file as a handle of at least this number, in place of this one."""
        import fcntl
        try:
            return fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, least)
        finally:
            os.close(handle)

    def lock(self, handle: int, is_shared: bool = False, waits: bool = False) -> bool:
        """Lock an open file until it is closed; False when somebody else has locked it, unless this `waits`."""
        import fcntl
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def guard(self, handle: int) -> bool:
        """Lock a file that is open for writing for this process, until it closes the file or ends.

        False: somebody reads it under a lock.  Children do not inherit this lock, and only who may write can take it.
        """
        import fcntl
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def is_guarded(self, handle: int) -> bool:
        """Whether another process guards a file that is open for reading."""
        import fcntl
        try:
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):      # EAGAIN, EACCES; another error says nothing of others
            return True
        fcntl.lockf(handle, fcntl.LOCK_UN)
        return False

    def stat(self, file: str | int, folder: int | None = None, is_followed: bool = True) -> os.stat_result:
        """What is known of a path or a handle.  Not `is_followed`: of a link itself."""
        return os.stat(file, dir_fd=folder, follow_symlinks=is_followed)

    def can_read(self, path: str) -> bool:
        return os.access(path, os.R_OK)

    def chmod(self, file: str | int, mode: int) -> None:
        os.chmod(file, mode)

    def touch(self, file: str | int) -> None:
        """Make the present time that of its last change."""
        os.utime(file)

    def link(self, path: str, other: str) -> None:
        """Give a file a second name."""
        os.link(path, other)

    def replace(self, path: str, other: str) -> None:
        """Rename a file or a folder; a file that is there already goes."""
        os.replace(path, other)

    def unlink(self, path: str, folder: int | None = None) -> None:
        os.unlink(path, dir_fd=folder)

    def mkdir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def makedirs(self, path: str, mode: int = 0o700) -> None:
        """Make a folder with its parents, unless it is there."""
        os.makedirs(path, mode, exist_ok=True)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def listdir(self, folder: str | int) -> list[str]:
        return os.listdir(folder)

    def realpath(self, path: str) -> str:
        """The path without links."""
        return os.path.realpath(path)

    def statvfs(self, path: str) -> os.statvfs_result:
        """What is free on its file system."""
        return os.statvfs(path)


NO_UNIX = "a file system of Windows, like exFAT or WSL's /mnt/c, may lack what nexus needs: name a folder elsewhere: " \
    "export NEXUS_HOME=FOLDER"


def describe_disk_error(error: OSError, action: str, path: str) -> NexusError:
    import errno
    hints = {errno.ENOSPC: "make room there; nexus goes on by itself", errno.EDQUOT: "your quota is used up: make room",
             errno.EACCES: "check who owns it: ls -ld", errno.EROFS: "the file system is mounted read-only",
             errno.ENXIO: "see what is there: ls -ldL", errno.ENOTDIR: "move away what is no folder: ls -ld",
             **dict.fromkeys((errno.EPERM, errno.EOPNOTSUPP), NO_UNIX)}
    hint = hints.get(error.errno or 0, "")
    return NexusError("unavailable", f"cannot {action} {path or error.filename}: {error.strerror or error}", hint)


# The names of errors that each start would meet now
MACHINE_FAULTS = ("EMFILE", "ENFILE", "EAGAIN", "ENOMEM", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", "EIO", "ETIMEDOUT")


def is_machine_fault(error: OSError) -> bool:
    import errno
    return errno.errorcode.get(error.errno or 0) in MACHINE_FAULTS


class disk_errors:
    """`with disk_errors("write", path):` turns an OSError into NexusError; path "": the error's own."""

    def __init__(self, action: str, path: str) -> None:
        self.action, self.path = action, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise describe_disk_error(error, self.action, self.path) from error


def make_folder(disk: Disk, path: str) -> None:
    """Make a private folder, with its parents.  Raises: unavailable."""
    with disk_errors("make", path):
        disk.makedirs(path)


def find_user(uid: int) -> str:
    import pwd
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


# Whoever can write into a folder of nexus's, or exchange it, can run commands as its owner.  The owner and the group of
# a folder above it are trusted.

def check_owner(disk: Disk, path: str, what: str) -> None:
    """Raises: forbidden, when another user owns it; unavailable."""
    uid = os.geteuid()
    with disk_errors("look at", path), contextlib.suppress(FileNotFoundError):
        uid = disk.stat(path).st_uid
    if uid != os.geteuid():
        raise NexusError("forbidden", f"{path} ({what}) belongs to {find_user(uid)}, and you are "
                         f"{find_user(os.geteuid())}: its owner could run commands as you",
                         hint="name a folder of your own: export NEXUS_HOME=~/.nexus, or nexus config edit")


def check_folder(disk: Disk, path: str, what: str) -> None:
    """Raises: forbidden, when others own a folder, can write into it, or exchange it; OSError, unavailable."""
    import stat
    check_owner(disk, path, what)
    if disk.stat(path).st_mode & 0o022:
        raise NexusError("forbidden", f"others may write into {path} ({what}), and could run commands as you",
                         hint=f"look at what is in it; then chmod go-w {path}, or name another folder")
    trusted = {os.geteuid(), disk.stat("/").st_uid}     # root, which may have another number in a container
    for place in (path, disk.realpath(path)):           # a link may be exchanged, and what it leads to
        while place != "/":
            parent = os.path.dirname(place)
            status, owner = disk.stat(parent), disk.stat(place, is_followed=False).st_uid
            is_sticky = status.st_mode & stat.S_ISVTX and {status.st_uid, owner} <= trusted
            if status.st_mode & 0o002 and not is_sticky:
                raise NexusError("forbidden", f"other users could exchange {place} ({what}), and run commands as you",
                                 hint=f"name a folder elsewhere; or chmod o-w {parent}, if it is yours")
            place = parent


def secure_folders(disk: Disk, layout: Layout) -> None:
    """Make nexus's folders, which nobody else may write into, or exchange.  Raises: forbidden, unavailable."""
    with disk_errors("look at", ""):
        for path, what in ((layout.home, "NEXUS_HOME"), (layout.journal_dir, "the folder of [state] state_file"),
                           (layout.log_dir, "[state] log_dir")):
            make_folder(disk, path)
            check_folder(disk, path, what)
        disk.chmod(layout.home, disk.stat(layout.home).st_mode & 0o7700)


def find_status(disk: Disk, path: str, is_followed: bool = True) -> os.stat_result | None:
    """What is known of a path; None: there is nothing, or nothing that can be looked at."""
    try:
        return disk.stat(path, is_followed=is_followed)
    except (OSError, ValueError):
        return None


def is_file(disk: Disk, path: str) -> bool:
    import stat
    status = find_status(disk, path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(disk: Disk, path: str) -> bool:
    import stat
    status = find_status(disk, path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def find_files(disk: Disk, prefix: str, ending: str = "") -> list[str]:
    """The paths that begin and end so, in the order of their names."""
    folder, name = os.path.split(prefix)
    with contextlib.suppress(OSError):
        return [os.path.join(folder, each) for each in sorted(disk.listdir(folder))
                if each.startswith(name) and each.endswith(ending)]
    return []


class open_file:
    """`with opened(disk, path, flags) as handle:` the handle of a file.  Raises: OSError."""

    def __init__(self, disk: Disk, path: str, flags: int) -> None:
        self.disk, self.handle = disk, disk.open(path, flags)

    def __enter__(self) -> int:
        return self.handle

    def __exit__(self, *_: object) -> None:
        self.disk.close(self.handle)


FILE_BYTES = 64 * 2**20             # of a file that is read whole, unless its reader says otherwise
CONFIG_BYTES = 2**20                # of config.toml, llm_config, and files of TLS
STATE_BYTES = 16 * 2**30            # of state.json and its journal
JOB_FILE_BYTES = 2**20              # of a small file in a job's folder


def read_whole(disk: Disk, path: str, most_bytes: int = FILE_BYTES, flags: int = 0) -> bytes:
    """What is in a regular file.  Pipes and devices may block, or never end: they are refused.  Raises: OSError."""
    import errno
    import stat
    pieces, size = list[bytes](), 0
    with open_file(disk, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags) as handle:
        status = disk.stat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENXIO, "it is no regular file")         # as an open() of a socket has it
        while size <= most_bytes and status.st_size <= most_bytes:
            piece = disk.read(handle, 2**20)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            size += len(piece)
    raise OSError(errno.EFBIG, f"it is longer than {format_memory(most_bytes / 2**20)}")


def decode_text(content: bytes, errors: str = "strict") -> str:
    """The text in a file: lines may end in \\r\\n.  Raises: ValueError."""
    return content.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def read_text(disk: Disk, path: str, most_bytes: int = FILE_BYTES) -> str | None:
    """The text of a file; None when there is none.  Raises: unavailable."""
    with disk_errors("read", path), contextlib.suppress(FileNotFoundError):
        return decode_text(read_whole(disk, path, most_bytes), "replace")
    return None


def read_job_file(disk: Disk, path: str) -> str | None:
    """The text of a small file in a job's folder; None when there is none.  Raises: unavailable.

    The job may have put anything there: what is no regular file, or is longer than such a file, is empty.
    """
    import errno
    with disk_errors("read", path):
        try:
            return read_whole(disk, path, JOB_FILE_BYTES, os.O_NOFOLLOW).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EFBIG):      # a link, another kind, too long
                return ""
            raise


def read_bytes(disk: Disk, path: str) -> bytes:
    """Raises: unavailable."""
    with disk_errors("read", path):
        return read_whole(disk, path)


def read_json(disk: Disk, path: str) -> dict[str, Any] | None:
    """A JSON object from a file; None when there is none, or it is torn."""
    with contextlib.suppress(ValueError, TypeError):
        return dict(decode("dict", load_json(read_text(disk, path) or "")))
    return None


def stamp_of(disk: Disk, path: str) -> tuple[int, ...] | None:
    """What identifies a file and its content."""
    status = find_status(disk, path)
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status else None


def write_at(disk: Disk, handle: int, content: bytes, at: int) -> None:
    """Write all of it, from byte `at` on.  Raises: OSError; then a part may be written."""
    done = 0
    while done < len(content):
        done += disk.pwrite(handle, content[done:], at + done)


def join_blocks(pieces: Iterable[str]) -> Iterator[bytes]:
    """Text in blocks of about 1 MiB: smaller writes release the GIL for too short a time for other threads."""
    block, size = list[str](), 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= 2**20:
            yield "".join(block).encode("utf-8", "surrogateescape")
            block, size = [], 0
    yield "".join(block).encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def write_aside(disk: Disk, aside: str, pieces: Iterable[str], mode: int = 0o600,
                is_synced: bool = True) -> Iterator[str]:
    """Write a new file; it is removed unless it is renamed in the block.  Raises: OSError, unavailable."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        try:
            handle = disk.open(aside, flags, mode)
        except FileExistsError:     # a crash may have left it; and in a shared folder it may be somebody's link
            remove_file(disk, aside)
            handle = disk.open(aside, flags, mode)
        try:
            size = 0
            for block in join_blocks(pieces):
                write_at(disk, handle, block, size)
                size += len(block)
            if is_synced:
                disk.fsync(handle)
        finally:
            disk.close(handle)
        yield aside
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(aside)


def write_atomic(disk: Disk, path: str, pieces: Iterable[str], mode: int = 0o600, is_synced: bool = True) -> None:
    """Replace a file as a whole.  Raises: unavailable; then nothing has changed."""
    import threading
    with disk_errors("write", path):
        with write_aside(disk, f"{path}.{threading.get_native_id()}.tmp", pieces, mode, is_synced) as aside:
            disk.replace(aside, path)
        if is_synced:
            sync_folder(disk, os.path.dirname(path))


def write_new(disk: Disk, path: str, text: str, mode: int) -> bool:
    """Write a file, unless something is there.  Raises: unavailable; then it is not there."""
    with disk_errors("write", path):
        try:
            handle = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            return False
        try:
            write_at(disk, handle, text.encode("utf-8", "surrogateescape"), 0)
        except BaseException:
            disk.unlink(path)
            raise
        finally:
            disk.close(handle)
    return True


def is_own_file(disk: Disk, path: str) -> bool:
    """Whether it is a file of this user's into which nobody else may write, and no link to one."""
    import stat
    status = find_status(disk, path, is_followed=False)
    return (status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            and not status.st_mode & 0o022)


def write_if_changed(disk: Disk, path: str, text: str) -> None:
    """Write a file unless it is this one already: what is there needs no room on a full disk.  Raises: unavailable."""
    if not is_own_file(disk, path) or read_text(disk, path) != text:
        write_atomic(disk, path, [text])


def sync_folder(disk: Disk, path: str) -> None:
    """Make renames in a folder survive a crash."""
    with open_file(disk, path, os.O_DIRECTORY) as handle:
        disk.fsync(handle)


def take_lock(disk: Disk, path: str) -> int | None:
    """Lock a file for as long as this process lives; None when another process has.  Raises: OSError."""
    handle = disk.open(path, os.O_RDWR | os.O_CREAT)
    if disk.lock(handle):
        return handle
    disk.close(handle)
    return None


def is_locked(disk: Disk, path: str) -> bool:
    """Whether anybody has locked a file, even in another container."""
    try:
        with open_file(disk, path, os.O_RDWR) as handle:
            return not disk.lock(handle)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)         # other errors: assume that it is


def append_whole(disk: Disk, handle: int, record: bytes, is_synced: bool = False) -> None:
    """Append to an open file.  Raises: OSError, after removing what was written, if the disk allows it."""
    size = disk.size(handle)
    try:
        write_at(disk, handle, record, size)
        if is_synced:
            disk.fdatasync(handle)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.truncate(handle, size)
        raise


# Parts of logs.  A missing or unreadable file, or a link or a FIFO in its place, counts as empty.

def measure(disk: Disk, path: str) -> int:
    import stat
    status = find_status(disk, path, is_followed=False)
    if status and status.st_size and stat.S_ISREG(status.st_mode) and disk.can_read(path):
        return status.st_size
    return 0


def check_directory(disk: Disk, name: str, path: str) -> None:
    """Raises: usage, when the directory of a job is none."""
    if not is_folder(disk, path):
        refuse(f"{name} {format_line(path, 200)} is not a directory", hint="make it first: the job runs in it")


def read_changed_at(disk: Disk, path: str) -> int:
    """When a log was last written to, in nanoseconds; 0: never."""
    status = find_status(disk, path)
    return status.st_mtime_ns if status else 0


def remove_file(disk: Disk, path: str) -> None:
    """Raises: unavailable; not for a missing file."""
    with disk_errors("remove", path), contextlib.suppress(FileNotFoundError):
        disk.unlink(path)

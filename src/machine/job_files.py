"""A job's folder: its logs, its scripts, and their removal.

A job may exchange its log folder and each file and folder below it for a link to what is somebody's,
or a FIFO, which blocks whoever opens it.  Nothing is written or removed through them.
"""

from __future__ import annotations

import contextlib
import os
import re

from ..values.errors import NexusError
from .disk import Disk, append_whole, disk_errors, find_status, measure, open_file, remove_file

STREAM_FILES = ("stdout.log", "stderr.log")


# A job may exchange its log folder and each file and folder below it for a link to what is somebody's,
# or a FIFO, which blocks whoever opens it.  Nothing is written or removed through them.

def is_real_folder(disk: Disk, path: str) -> bool:
    """Whether it is a folder, and no link to one."""
    import stat
    status = find_status(disk, path, is_followed=False)
    return status is not None and stat.S_ISDIR(status.st_mode)


def put_aside(disk: Disk, path: str) -> str:
    """Give what is there another name; return that.  Raises: OSError."""
    number = 1
    while find_status(disk, aside := f"{path}.old-{number}", is_followed=False):
        number += 1
    disk.replace(path, aside)
    return aside


def make_job_folder(disk: Disk, path: str) -> None:
    """Make a folder of a job's, with its parents, unless it is there.  Anything else in its place is put aside.

    Raises: OSError.
    """
    if not is_real_folder(disk, path):
        if find_status(disk, path, is_followed=False):
            put_aside(disk, path)
        disk.makedirs(path)


def make_way(disk: Disk, path: str) -> None:
    """Remove what is no file from the place of one; a folder is put aside.  Raises: OSError."""
    import stat
    status = find_status(disk, path, is_followed=False)
    if status and stat.S_ISDIR(status.st_mode):
        put_aside(disk, path)
    elif status and not stat.S_ISREG(status.st_mode):
        disk.unlink(path)


def clear_way(disk: Disk, folder: str, attempt: int) -> None:
    """make_way() for the files that an attempt writes; a claim and a result that are files count.  Raises: OSError."""
    for name in (*STREAM_FILES, "job.sh", "job.json", f"attempt-{attempt}", f"result-{attempt}.json",
                 f"fault-{attempt}", f"slurm-{attempt}.log"):
        make_way(disk, os.path.join(folder, name))


# The files that nexus puts into a job's log folder.  Others, like work/ and files/, are the job's, or unknown.
OWN_FILES = (r"std(out|err)\.log|log\.times|job\.json|job\.sh(\.\d+\.tmp)?|(attempt|claim|fault)-\d+|"
             r"warned-\d+-[\d.]+|result-\d+\.json|slurm-\d+\.log")


def remove_job_files(disk: Disk, log_dir: str, folder: str) -> None:
    """Remove nexus's files from a job's log folder, and the folder if it is empty then.

    Only a real folder directly below log_dir is touched, and no link is followed.  Raises: unavailable.
    """
    import stat
    if os.path.join(log_dir, os.path.basename(folder)) != folder or not os.path.basename(folder).startswith("job_"):
        raise NexusError("unavailable",
                         f"{folder or 'a folder without a name'} was left: it is no job's, below {log_dir}")
    with disk_errors("remove the logs in", folder), contextlib.suppress(FileNotFoundError):
        with open_file(disk, folder, os.O_DIRECTORY | os.O_NOFOLLOW) as handle:
            for name in [name for name in disk.listdir(handle) if re.fullmatch(OWN_FILES, name)]:
                if not stat.S_ISDIR(disk.stat(name, handle, is_followed=False).st_mode):      # a folder is the job's
                    disk.unlink(name, handle)
        work = os.path.join(folder, "work")
        if is_real_folder(disk, work):
            remove_file(disk, os.path.join(work, "main.py"))
        for path in (work, folder):
            with contextlib.suppress(OSError):      # the folder is not empty
                disk.rmdir(path)


def measure_logs(disk: Disk, folder: str | None) -> tuple[int, int]:
    """(bytes of stdout.log, bytes of stderr.log).  A job that has not begun has no folder."""
    out, err = [measure(disk, os.path.join(folder, name)) if folder else 0 for name in STREAM_FILES]
    return out, err


def append_log(disk: Disk, path: str, piece: bytes, start: int) -> None:
    """Append an attempt's output from a node to a job's log, all or nothing.  Raises: OSError.

    `start`: the bytes of former attempts.  A log that was cut here since has NULs in their place.
    """
    make_job_folder(disk, os.path.dirname(path))
    make_way(disk, path)
    with open_file(disk, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW) as handle:
        if disk.size(handle) < start:
            disk.truncate(handle, start)
        append_whole(disk, handle, piece)

"""Claims and results: whose an attempt is, and how it ended."""

from __future__ import annotations

import contextlib
import os
import re

from ..formats.codec import decode_value
from ..formats.nvidia_smi import is_number
from ..formats.proc import Process
from ..formats.runner_events import Result
from ..machine.disk import Disk, find_status, open_file, read_job_file, write_aside, write_at
from ..machine.job_files import make_job_folder
from ..machine.processes import Processes
from ..schedule.ends import OPEN_CLAIM, OUR_CLAIM, Claim
from ..values.causes import RUNNER_CAUSES
from ..values.text import check_time, cut_words, load_json
from ..values.value import replace

# PID STARTED KEY, and the time of the begin, in 1/100 s since boot, which are clock ticks on Linux.  An older nexus
# wrote no key.
CLAIM = r"([0-9]{1,7}) ([0-9]{1,15})(?: ([A-Za-z0-9-]{1,40}))?\n(?:([0-9]{1,15})\n)?"


def split_key(key: str) -> tuple[str, int]:
    """(the key of the job, the number of the attempt) of an attempt_key."""
    job_key, _, attempt = key.rpartition("-")
    return job_key, int(attempt)


def read_claim(disk: Disk, folder: str, key: str) -> Claim | None:
    """Whose an attempt is; None: nobody's, as the file is missing or is another's.  Raises: unavailable."""
    text = read_job_file(disk, os.path.join(folder, f"attempt-{split_key(key)[1]}"))
    match = re.match(CLAIM, text or "")
    if match and match[3] not in (None, key):
        return None
    if match and is_number(match[1], "Pid"):
        return Claim(int(match[1]), int(match[2]), int(match[4]) if match[4] else None)
    if text is None:
        return None
    return OUR_CLAIM if match and int(match[1]) == 0 else OPEN_CLAIM


def take_claim(disk: Disk, folder: str, key: str) -> Claim:
    """Claim an attempt that nobody runs; return whose it is.  Its file is empty at no moment.  Raises: OSError."""
    import threading
    path, text = os.path.join(folder, f"attempt-{split_key(key)[1]}"), f"0 0 {key}\n"
    make_job_folder(disk, folder)
    if not find_status(disk, path, is_followed=False):
        aside = os.path.join(folder, f"claim-{threading.get_native_id()}")
        with write_aside(disk, aside, [text], is_synced=False), contextlib.suppress(FileExistsError):
            try:
                disk.link(aside, path)
            except PermissionError:                     # the file system takes no hard links
                with open_file(disk, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
                    write_at(disk, handle, text.encode(), 0)
    return read_claim(disk, folder, key) or OPEN_CLAIM


def withdraw(disk: Disk, processes: Processes, folder: str, key: str) -> tuple[bool, list[Process]]:
    """Claim an attempt on this machine that nobody runs.  Raises: OSError.

    Return whether it cannot begin any more; and the processes that may still write an open claim.  As long as there is
    one, it may begin, however slow it is.
    """
    claim = take_claim(disk, folder, key)
    if not claim.is_open:
        return not claim.pid, []
    writers = processes.find_runners(os.path.join(folder, "job.sh"), split_key(key)[1])
    # The last one may have written it before it ended.
    return not writers and not (read_claim(disk, folder, key) or claim).pid, writers


def read_result(disk: Disk, folder: str, key: str) -> Result | None:
    """How an attempt ended, as its job.sh wrote it; None: it did not, or the file is not as its job.sh writes it.

    Raises: unavailable.
    """
    with contextlib.suppress(ValueError, TypeError, OSError):
        attempt = split_key(key)[1]
        path = os.path.join(folder, f"result-{attempt}.json")
        kept = load_json(read_job_file(disk, path) or "")
        result = decode_value(Result, kept)
        if kept.get("key", key) != key:                                    # an older nexus wrote none
            return None
        # job.sh writes it last; what stops a job knows whether it has.
        result = replace(result, finished_at=check_time(disk.stat(path).st_mtime), ended_itself=False)
        if result.runtime_seconds is not None and result.cause in (None, *RUNNER_CAUSES):
            if result.goes_on:                                             # these are the command's, not the job's
                return replace(result, finished_at=None, runtime_seconds=None)
            words = read_job_file(disk, os.path.join(folder, f"fault-{attempt}")) if result.cause else None
            return replace(result, cause_line=cut_words(words.strip())) if words else result
    return None

"""PATH: where programs are.  A folder that does not answer is passed over."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from .. import text_of
from ..formats.codec import encode_json
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from .disk import Disk, read_json, write_if_changed
from .layout import Layout
from .processes import has_ended
from .scratch import open_scratch, read_scratch

if TYPE_CHECKING:
    from typing import Any

    from ..opening import T

FOLDER_TIMEOUT_S = 5.0          # of a look at a folder, and of a search of PATH
HUNG_FOLDERS: dict[str, Callable[[], bool]] = {}    # {a folder that does not answer: whether it has answered now}
ROOT_FOLDERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin")       # where these hang, nothing runs


def list_hung_folders() -> list[str]:
    """The folders that have not answered yet: nothing is looked for there meanwhile."""
    for folder in [folder for folder, has_answered in list(HUNG_FOLDERS.items()) if has_answered()]:
        HUNG_FOLDERS.pop(folder, None)
    return list(HUNG_FOLDERS)


def find_program(name: str, path: str | None = None, mode: int = os.F_OK | os.X_OK) -> str | None:
    """Where a program is on PATH.  A folder that does not answer is passed over."""
    base = os.path.basename(name)
    return look_in([base], [os.path.dirname(name)] if "/" in name else split_path(path), mode).get(base)


def find_programs(names: Sequence[str], path: str | None = None) -> dict[str, str]:
    """{name: where it is} of the programs that are on PATH: one search for all of them."""
    return look_in(names, split_path(path), os.F_OK | os.X_OK)


def split_path(path: str | None) -> list[str]:
    path = os.environ.get("PATH", os.defpath) if path is None else path
    return path.split(":") if path else []


def look_in(names: Sequence[str], folders: list[str], mode: int) -> dict[str, str]:
    import itertools
    import shutil
    first = list(itertools.takewhile(ROOT_FOLDERS.__contains__, folders))
    found = {name: place for name in names if (place := shutil.which(name, mode, ":".join(first)))} if first else {}
    left = [name for name in names if name not in found]
    return {**found, **search_folders(left, folders[len(first):], mode)} if left else found


# Writes `>` and each folder before it looks there, and `=` and each program that it finds.
SEARCH_SCRIPT = text_of("search.sh")


def search_folders(names: Sequence[str], folders: Sequence[str], mode: int) -> dict[str, str]:
    """{name: where it is} of programs in folders of which some may hang.

    A child looks: it may be left behind for as long as a folder hangs, and no signal ends a process that has a thread
    that waits so.
    """
    import shutil
    import subprocess
    while folders := [folder for folder in folders if folder not in list_hung_folders()]:
        with open_scratch() as output:
            try:
                child = subprocess.Popen(
                    ["/bin/sh", "-c", SEARCH_SCRIPT, "sh", "-x" if mode & os.X_OK else "-e", "/".join(names), *folders],
                    env={}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                    start_new_session=True)
            except OSError:                             # this user may have no more processes
                path = ":".join(folder or "." for folder in folders)
                return {name: place for name in names if (place := shutil.which(name, mode, path))}
            try:
                child.wait(FOLDER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                entered = [text[1:] for text in list_words(output) if text.startswith(">")][-1:]
                HUNG_FOLDERS.update(dict.fromkeys(entered or folders, functools.partial(has_ended, child)))
                continue
            return {os.path.basename(text): text[1:] for text in list_words(output) if text.startswith("=")}
    return {}


def list_words(output: Any) -> list[str]:
    """What a search has written so far."""
    return read_scratch(output, "surrogateescape").split("\0")[:-1]


def ask_folder(folder: str, look: Callable[[], T]) -> T:
    """look(), which looks at files in a folder.  Raises: OSError, when that does not answer; as look()."""
    import errno
    import threading
    found: list[Any] = []

    def act() -> None:
        try:
            found.append(look())
        except (OSError, ValueError, NexusError) as error:
            found.append(error)

    if folder not in list_hung_folders():
        thread = threading.Thread(target=act, name="looking at folders", daemon=True)
        thread.start()
        thread.join(FOLDER_TIMEOUT_S)
        if thread.is_alive():
            HUNG_FOLDERS[folder] = lambda: not thread.is_alive()
    if not found:
        raise OSError(errno.ETIMEDOUT, "it does not answer", folder)
    if isinstance(found[0], Exception):
        raise found[0]
    answer: T = found[0]
    return answer


def leave_out_hung(path: str) -> str:
    """PATH without the folders that do not answer."""
    hung = list_hung_folders()
    return ":".join(folder for folder in path.split(":") if folder not in hung)


def keep_needed(path: str, names: Iterable[str]) -> str:
    """PATH with only the folders in which these programs are: others, which may hang later, are never entered."""
    needed = set(map(os.path.dirname, find_programs(list(names), path).values()))
    return ":".join(folder for folder in path.split(":") if folder.rstrip("/") in needed) or path


# A service that `ssh box nexus add` has started, or systemd, or cron, has a bare PATH.
PROGRAMS = ("bash", "nvidia-smi", "screen", "git", "ssh", "sbatch", "squeue", "scancel", "scontrol")   # that it runs
DRIVER_FOLDERS = {              # {a program: where drivers put it, whatever PATH is}
    "nvidia-smi": ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/opt/bin")}


def complete_path(disk: Disk, layout: Layout, path: str | None) -> str:
    """PATH, and behind it where the programs are that it lacks.

    That is where the last service found them, or where drivers put them.
    """
    path, programs = path or os.defpath, read_json(disk, layout.programs_file) or {}
    found = find_programs(PROGRAMS, path)
    added: list[str] = []
    for name in PROGRAMS:
        if name not in found and not (added and find_program(name, ":".join(added))):
            kept, usual = programs.get(name), DRIVER_FOLDERS.get(name, ())
            if isinstance(kept, str) and find_program(name, kept) and (kept in usual or is_own_folder(kept)):
                added.append(kept)
            elif usual and (place := find_program(name, ":".join(usual))):
                added.append(os.path.dirname(place))
    return ":".join([path, *added])


def keep_programs(disk: Disk, layout: Layout, path: str) -> None:
    """Remember in which folders the programs are now.  Raises: unavailable."""
    found = {name: os.path.dirname(place) for name, place in find_programs(PROGRAMS, path).items()}
    programs = read_json(disk, layout.programs_file) or {}
    write_if_changed(disk, layout.programs_file, encode_json({**programs, **found}) + "\n")


def is_own_folder(path: str) -> bool:
    """Whether nobody but root and this user can put a program there."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        is_owned = status.st_uid in (os.geteuid(), os.stat("/").st_uid)     # root may have another number
        return is_owned and os.path.isabs(path) and not status.st_mode & 0o002
    return False


@functools.lru_cache(1000)
def find_job_python(path: str, minute: int) -> str | None:
    """The Python of a job with this PATH; None: it has none.  It is looked for once in a minute."""
    found = find_programs(("python", "python3"), path)
    return found.get("python", found.get("python3"))


def find_python(environ: Mapping[str, str]) -> str:
    """`python`, or `python3` where PATH has no python."""
    return "python" if find_program("python", environ.get("PATH") or os.defpath) else "python3"

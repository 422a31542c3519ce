"""Other programs: run() runs them to their end, spawn() leaves them to themselves.

Only run() runs other programs, except those which nexus leaves to themselves (a job, the service) or to the user
(an editor), and the search of PATH.  A program may hang in the kernel, where SIGKILL does not help.  Such a program
is left behind after its timeout, and not started again while it lives.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.text import format_line, format_memory
from ..values.value import Value
from .clock import wait_until
from .processes import has_ended
from .scratch import open_scratch, read_scratch
from .search_path import find_program, list_hung_folders

if TYPE_CHECKING:
    import subprocess
    from typing import Any


class Completed(Value):
    exit_code: int
    output: str                 # stdout, and stderr unless is_apart
    errors: str = ""            # stderr, with is_apart


STUCK: dict[str, subprocess.Popen[bytes]] = {}      # {purpose: a program that no signal ends}
OUTPUT_INTERVAL_S = 0.2         # how often the output of a program that may write only so much is measured
STUCK_HINT = "a driver or a file system does not answer: see dmesg; a reboot may be needed"


def end_program(process: subprocess.Popen[bytes]) -> bool:
    """End a program of run(), and what it has started; return whether they have ended."""
    import signal
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):   # SIGKILL at once can freeze a card
        with contextlib.suppress(OSError):              # the whole group is gone, or another user's
            os.killpg(process.pid, number)
        if wait_until(lambda: has_ended(process), patience_s, 0.02):
            return True
    return False


def run(argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None, *,
        stdin: str = "", is_apart: bool = False, undecodable: str = "replace", most_bytes: int = 0, purpose: str = "",
        hint: str = "try it by hand", install: str = "install it") -> Completed:
    """Run a program to its end, or leave it behind: run() always returns in time.

    It is ended when it writes more than `most_bytes`, unless that is 0; a Ctrl-C ends it, too.  While a program that no
    signal ends lives, none is started for the same `purpose`.
    Raises: unavailable, with the program's last words; with the hint `install` when there is no such program.
    """
    import subprocess
    purpose = purpose or argv[0]
    if purpose in STUCK and not has_ended(STUCK[purpose]):
        raise NexusError("unavailable", f"{purpose} (pid {STUCK[purpose].pid}) hangs and cannot be ended", STUCK_HINT)
    path = (os.environ if environ is None else environ).get("PATH", os.defpath)
    place = find_program(argv[0], path) or find_program(argv[0], path, os.F_OK)         # that one is not executable
    if not place:
        hung = "".join(f"; {folder} does not answer" for folder in list_hung_folders())
        raise NexusError("unavailable", f"{argv[0]} was not found on PATH{hung}", install)
    with open_scratch() as given, open_scratch() as output, open_scratch() as errors:
        # Files instead of pipes: a background process of the program would keep a pipe open.
        given.write(stdin.encode("utf-8", "surrogateescape"))
        given.seek(0)
        try:
            process = subprocess.Popen(argv, executable=place, stdin=given, stdout=output, env=environ,
                                       stderr=errors if is_apart else subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise NexusError("unavailable", f"{argv[0]} cannot be run: {error.strerror}", hint) from None
        give_up_at, message = time.monotonic() + timeout_s, ""
        try:
            while not message:
                left_s = max(0.0, give_up_at - time.monotonic())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = process.wait(min(left_s, OUTPUT_INTERVAL_S) if most_bytes else left_s)
                    return Completed(exit_code, read_scratch(output, undecodable), read_scratch(errors, undecodable))
                # No limit of the kernel's: git may write large files meanwhile.
                if most_bytes and any(os.fstat(file.fileno()).st_size > most_bytes for file in (output, errors)):
                    message = f"{purpose} writes more than {format_memory(most_bytes / 2**20)}"
                elif not left_s:
                    message = f"{purpose} did not answer within {timeout_s:g} s"
        except BaseException:                           # this command is being ended: so is what it has started
            end_program(process)
            raise
        if end_program(process):
            last = read_scratch(errors if is_apart else output).strip().rpartition("\n")[2]
            raise NexusError("unavailable", f"{message}{last and ': '}{format_line(last, 200)}", hint)
        STUCK[purpose] = process
        raise NexusError("unavailable", f"{message} and cannot be ended", STUCK_HINT)


class Spawned(Value):
    """A child of this process."""
    pid: int

    def poll(self) -> int | None:
        """How it has ended, as waitpid() tells it; None: it has not."""
        try:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:                       # whoever started this process has SIGCHLD ignored
            return 0
        return status if ended else None


def spawn(program: str, argv: Sequence[str], environ: Mapping[str, str],
          handles: Sequence[int] = ()) -> subprocess.Popen[bytes] | Spawned:
    """Start a program that goes on by itself: in a session of its own, in /, on /dev/null.  Raises: OSError.

    `program`: its path.  `handles`: open files that it gets, under the same numbers.

    posix_spawn() takes a third of subprocess's time, and of that before Python 3.10, which forks, a thirtieth.  It
    cannot change the directory, and some builds of Python cannot have it make a session.
    """
    import signal
    import subprocess
    if os.getcwd() == "/":
        # A copy is inherited; onto its own number dup2() changes nothing in older C libraries.
        files: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, *pair) for handle in handles for pair in ((handle, 1), (1, handle))]
        files += [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), *(
            (os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2))]
        with contextlib.suppress(NotImplementedError):
            return Spawned(os.posix_spawn(program, list(argv), environ, file_actions=files, setsid=True,
                                          setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]))
    return subprocess.Popen(argv, executable=program, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, cwd="/", env=environ, pass_fds=handles, start_new_session=True)

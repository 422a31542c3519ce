"""What starts job.sh: screen, or nothing."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence

from .. import text_of
from ..formats.runner_events import SCREEN_SESSION
from ..values.errors import NexusError
from ..values.text import format_line
from .disk import Disk, make_folder, write_if_changed
from .layout import Layout
from .programs import run
from .search_path import complete_path, find_program


class Launcher:
    """How job.sh is started, and the service's supervisor: in a session, with a terminal to attach to, or without."""
    program = ""                                        # of PATH; "": it needs none
    session_prefix = ""                                 # of the names of jobs' sessions; "": it has no sessions
    passes_handles = False                              # whether job.sh inherits open files of the service

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self.disk, self.layout = disk, layout

    @functools.cached_property
    def path(self) -> str:
        """PATH, on which its program is if it is installed."""
        return complete_path(self.disk, self.layout, os.environ.get("PATH"))

    def prepare(self) -> None:
        """Raises: unavailable, when it cannot be used: why, which begins with its program, and what helps."""
        if self.program and not find_program(self.program, self.path):
            raise NexusError("unavailable", f"{self.program} is not installed",
                             hint=f"install it: apt install {self.program}")

    def variables(self) -> dict[str, str]:
        """What its program needs in the environment, beside what the caller has."""
        return {}

    def environ(self) -> dict[str, str]:
        """The environment of its program and of runners; no job gets it."""
        names = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "USER", "LOGNAME", "SHELL")
        passed_on = {name: os.environ[name] for name in names if name in os.environ}
        return {"PATH": self.path, **passed_on, **self.variables()}

    def argv(self, name: str, command: Sequence[str], *, is_daemon: bool) -> list[str]:
        """How to start a command, in a session NAME.  `is_daemon`: the starter ends at once; else with the command."""
        raise NotImplementedError

    def attach(self, session: str) -> list[str]:
        """How to show a session, PID.NAME.  The exit code is 0 when it was left, or SESSION_OVER, or NOT_OPENED."""
        raise NotImplementedError

    def find_leave_keys(self, environ: Mapping[str, str]) -> str:
        """The keys that leave a session.  `environ`: where it is shown, as in a session of the user's own."""
        raise NotImplementedError

    def login_variables(self) -> tuple[str, ...]:
        """The variables, as NAME=TEXT, by which a new login finds its sessions: an agent tells them to its head."""
        return ()

    def list_sessions(self) -> dict[str, str]:
        """{PID.NAME: `Detached` or the like}.  Raises: unavailable."""
        return {}


SESSION_OVER, NOT_OPENED = 1, 2         # exit codes of attach()


class Direct(Launcher):
    """No session: job.sh is a child of the service, and the supervisor of init."""
    passes_handles = True

    def argv(self, name: str, command: Sequence[str], *, is_daemon: bool) -> list[str]:
        return ["/bin/sh", "-c", '"$@" &', name, *command] if is_daemon else list(command)


MAX_SCREENDIR = 70          # bytes: with a longer socket path screen fails without a message
SCREEN_RC = text_of("screenrc")


class Screen(Launcher):
    """GNU screen.  Sessions are named PID.NAME, as screen matches names by their prefixes."""
    program = "screen"
    session_prefix = "nexus_job_"

    def __init__(self, disk: Disk, layout: Layout) -> None:
        super().__init__(disk, layout)
        self.own_folder = os.path.join(layout.home, "screen")
        self.folder: str | None = None          # SCREENDIR, where the default does not work

    def prepare(self) -> None:
        """Choose a place for the sockets, too: the default, or else the home."""
        super().prepare()
        try:
            faults = self.choose_folder()
            if not faults:
                write_if_changed(self.disk, self.layout.screen_rc, SCREEN_RC)
                self.call("-wipe", "nexus")     # removes sockets of killed sessions with this prefix
        except (OSError, NexusError) as error:
            faults = str(error)
        if faults:
            is_of_folder = re.search("(?i)director|mode [0-7]{3}|too long|socket", faults)
            raise NexusError("unavailable", f"screen: {format_line(faults, 300)}", hint=(
                "its folder for sockets: export SCREENDIR=FOLDER, one of your own with mode 700, then nexus restart"
                if is_of_folder else "try it by hand: screen -ls"))

    def choose_folder(self) -> str:
        """Choose a place for the sockets; return why there is none, or "".  Raises: OSError, unavailable."""
        faults = []
        for folder in (None, self.own_folder):
            self.folder, path = folder, folder or os.environ.get("SCREENDIR", "")
            is_long = len(path) > MAX_SCREENDIR
            if folder and not is_long:
                make_folder(self.disk, path)
            reply = f"{path} is too long a path for its sockets" if is_long else self.call("-ls").strip()
            if re.search(r"No Sockets found|\((Detached|Attached|Dead)|There (is|are)", reply):
                return ""
            faults.append(reply)
        return "; and ".join(faults)

    def call(self, *words: str) -> str:
        """Raises: unavailable."""
        return run(["screen", *words], 10, self.environ()).output

    def variables(self) -> dict[str, str]:
        folder = self.folder or os.environ.get("SCREENDIR")
        own = {} if folder is None else {"SCREENDIR": folder}
        return {"PATH": self.path, "TERM": "xterm-256color", "SYSSCREENRC": "/dev/null", **own}

    def argv(self, name: str, command: Sequence[str], *, is_daemon: bool) -> list[str]:
        mode = ["-d", "-m"] if is_daemon else ["-D", "-m"]
        return ["screen", "-c", self.layout.screen_rc, *mode, "-S", name, *command]

    def attach(self, session: str) -> list[str]:
        own = session.partition(".")[0] + "."   # its pid: screen names the session a moment after the start
        return ["sh", "-c", 'screen -x "$0" || exit 2; screen -ls "$0" | grep -qF "$0"', own]

    def find_leave_keys(self, environ: Mapping[str, str]) -> str:
        return "Ctrl-A a D" if environ.get("STY") else "Ctrl-A D"

    def login_variables(self) -> tuple[str, ...]:
        return (f"SCREENDIR={self.folder}",) if self.folder else ()

    def list_sessions(self) -> dict[str, str]:
        return dict(re.findall(SCREEN_SESSION, self.call("-ls")))


LAUNCHERS: Mapping[str, type[Launcher]] = {             # {[jobs] launcher: its class}
    "screen": Screen, "direct": Direct,
    "slurm": Direct}                                    # for the service: Slurm starts the jobs


def prepare_launcher(name: str, disk: Disk, layout: Layout) -> tuple[Launcher, NexusError | None]:
    """The launcher of this name; where it cannot be used, Direct, and why."""
    launcher = LAUNCHERS[name](disk, layout)
    try:
        launcher.prepare()
    except NexusError as error:
        return Direct(disk, layout), error
    return launcher, None


WITH_SESSIONS = [kind for kind in LAUNCHERS.values() if kind.session_prefix]


def find_launcher(session: str) -> type[Launcher]:
    """The launcher that has a job's session, whatever the configuration says by now."""
    name = session.partition(".")[2]
    return next((kind for kind in WITH_SESSIONS if name.startswith(kind.session_prefix)), Screen)


def list_sessions(disk: Disk, layout: Layout) -> dict[str, str]:
    """{PID.NAME: its state} of nexus's sessions.  Raises: unavailable, when no launcher that has any can be used."""
    found, errors = dict[str, str](), list[NexusError]()
    for kind in WITH_SESSIONS:
        launcher = kind(disk, layout)
        try:
            launcher.prepare()
            sessions = launcher.list_sessions()
        except NexusError as error:
            errors.append(error)
            continue
        ours = re.compile(rf"\d+\.(nexus$|{kind.session_prefix})")
        found.update((session, state) for session, state in sessions.items() if ours.match(session))
    if len(errors) == len(WITH_SESSIONS):
        raise errors[0]
    return found

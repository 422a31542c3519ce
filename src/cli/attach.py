"""`nexus attach` and `screens`."""

from __future__ import annotations

import functools
import sys
import time
from shlex import quote

from ..machine.clock import wait_until
from ..machine.launchers import NOT_OPENED, SESSION_OVER, find_launcher, list_sessions
from ..machine.search_path import find_program
from ..machine.ssh import Ssh
from ..opening import TYPE_CHECKING
from ..values.config import NodeConfig, parse_node
from ..values.errors import NexusError
from ..values.job import FINAL, PENDING, RUNNING
from ..values.text import refuse
from ..views.job_tables import Column, format_table
from ..views.show import describe_seen_end
from .chosen import find_one
from .context import Context
from .transport import DISK

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def cmd_attach(context: Context) -> int:
    """Attach to a job's screen session, here or on its node; then say whether the job has ended, and how."""
    job = find_one(context, [RUNNING])
    if job["status"] != RUNNING:
        raise NexusError("conflict", f"job {job['id']} is {job['status']}: there is nothing to attach to",
                         hint="why it waits: nexus queue" if job["status"] == PENDING else f"nexus logs {job['id']}")
    if not job["session"]:
        raise NexusError("conflict", f"job {job['id']} has no screen session", hint=f"nexus logs -f {job['id']}")
    if not sys.stdin.isatty():
        refuse("attach needs a terminal", hint=f"nexus logs -f {job['id']}")
    code = open_terminal(context, job)
    job = find_left(context, job, code)
    say_left(context, job, code)
    return 0 if job["status"] in FINAL else code


LINE_LOST = 255                 # ssh's exit code
END_TIMEOUT_S = 10.0            # of a job's end after that of its session, above all on a node


def open_terminal(context: Context, job: Json) -> int:
    """Show a running job's session; return 0 when it was left, or another exit code of Launcher.attach() or ssh."""
    import subprocess
    assert context.client.layout
    launcher = find_launcher(job["session"])(DISK, context.client.layout)
    words = launcher.attach(job["session"])
    node = next((node for node in context.client.nodes()[1:] if node["name"] == job["node"]), None)
    if node:
        ssh = Ssh(parse_node({key: node[key] for key in NodeConfig.FIELDS if node[key]}), context.own_environ)
        there = ["env", "TERM=xterm-256color", *node["screen"], *words]
        words, environ = ssh.list_words(" ".join(map(quote, there)), is_tty=True), ssh.environ
    else:
        launcher.prepare()
        # The launcher's own TERM: with one that terminfo lacks here screen would end at once, with exit code 0.
        environ = {**context.environ, **launcher.environ()}
    context.say(f"on {job['node']}: {launcher.find_leave_keys(context.environ)} leaves; "
                + ("keys and Ctrl-C go to the program" if job["tty"] else "Ctrl-C ends the job"))
    time.sleep(1.5)                                 # to be read: screen clears the terminal
    if context.client.job(job["id"])["status"] in FINAL:
        return NOT_OPENED
    return subprocess.call(words, env=environ, executable=find_program(words[0], environ.get("PATH")))


def find_left(context: Context, job: Json, code: int) -> dict[str, Any]:
    """What has become of a job whose terminal was shown.  Where that is over, the service hears of it in a moment."""
    def find_change() -> dict[str, Any] | None:
        now = context.client.job(job["id"])
        return now if now["status"] != RUNNING or now["attempt"] != job["attempt"] else None

    is_over = code in (SESSION_OVER, NOT_OPENED)
    return wait_until(find_change, END_TIMEOUT_S if is_over else 0, 0.1) or context.client.job(job["id"])


def say_left(context: Context, job: Json, code: int) -> None:
    job_id, lost = job["id"], f"the line to {job['node']} was lost; " if code == LINE_LOST else ""
    if job["status"] in FINAL:
        context.say(f"{describe_seen_end(job)}; what it printed: nexus logs {job_id}")
    elif code == SESSION_OVER:
        context.say(f"this terminal is over; job {job_id} is {job['status']}: nexus show {job_id}")
    else:
        context.say(f"{lost}job {job_id} goes on; nexus attach {job_id} comes back to it")


def cmd_screens(context: Context) -> None:
    assert context.client.layout
    commands = {job["session"]: job["command"] for job in context.client.jobs(status=RUNNING)}
    sessions = list_sessions(DISK, context.client.layout)
    others = {session: "the service's log" if session.endswith(".nexus") else "over, or of another NEXUS_HOME"
              for session in sessions}
    context.show(list(sessions), functools.partial(format_table, (
        Column("SESSION", cell=str, colour="magenta", is_free=True),
        Column("STATE", cell=lambda session: sessions[session]),
        Column("WHAT", cell=lambda session: commands.get(session, others[session]), colour="bright"),
    )), "there is no screen session of nexus")

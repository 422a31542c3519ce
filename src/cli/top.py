"""`nexus top`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import FINAL, PENDING, RUNNING
from ..values.text import format_count, format_line
from ..views.job_tables import list_top
from ..views.status_text import Paint, name_or_command
from .client import Client
from .context import Context
from .terminal import make_paint, unwinding
from .transport import encode_query

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


@unwinding()
def cmd_top(context: Context) -> None:
    """Redraw until q or Ctrl-C.  A terminal's alternate screen is used, so that the shell's screen comes back.

    Without a terminal it is drawn once.
    """
    if not (sys.stdin.isatty() and context.out.isatty()):
        return context.write("".join(f"{line}\n" for line, _ in draw_top(context, Paint(""))))
    import termios
    stdin, top = sys.stdin.fileno(), Top(context)
    before, modes = termios.tcgetattr(stdin), termios.tcgetattr(stdin)
    modes[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)     # keys come at once, Ctrl-C and Ctrl-Z too
    context.write(OWN_SCREEN)
    try:
        termios.tcsetattr(stdin, termios.TCSADRAIN, modes)
        while not top.has_ended:
            top.draw()
            for key in re.findall(r"(?s)\x1b[\[O][0-9;]*[A-Za-z~]|.", read_keys(1.0)):
                top.press(key)
                if top.asked:               # no pasted text answers what is not on the screen yet
                    termios.tcflush(stdin, termios.TCIFLUSH)
                    break
    except KeyboardInterrupt:
        pass
    finally:
        with contextlib.suppress(OSError, termios.error):           # the terminal is gone
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
            context.write(SHELL_SCREEN)


def read_keys(timeout_s: float) -> str:
    """What was typed; empty when that is nothing for so long.  Raises: KeyboardInterrupt, also without a terminal."""
    import select
    stdin, typed = sys.stdin.fileno(), b""
    if not select.select([stdin], [], [], timeout_s)[0]:
        return ""
    with contextlib.suppress(OSError):
        typed = os.read(stdin, 64)
    if not typed or b"\3" in typed:
        raise KeyboardInterrupt
    return typed.decode("utf-8", "ignore")


def draw_top(context: Context, paint: Paint, text: str = "", chosen_id: str = "") -> list[tuple[str, str]]:
    """As list_top().  At a terminal, with the last finished jobs.

    `text`: only jobs that have it.  `chosen_id`: this job is shown wherever it stands in its list, while it is kept.
    """
    try:
        client, chosen = Client.find(context.environ, is_starting=False), text or None
        waiting, total = client.ask_list("/queue" + encode_query({
            "group": None if text else "", "text": chosen, "limit": max(10, paint.height) if paint.height else 50,
            "fields": ",".join(TOP_FIELDS)}))
        status, groups = client.status(), [] if text else client.ask("GET", "/groups")
        finished = client.jobs(text=chosen, status=list(FINAL), sort="-finished_at", limit=5) if paint.height else []
        if text:
            ids = {job["id"] for job in client.jobs(text=text, status=RUNNING, fields="id")}
            status["running_jobs"] = [job for job in status["running_jobs"] if job["id"] in ids]
            status["gpu_status"] = [gpu for gpu in status["gpu_status"] if ids & {*gpu["job_ids"]}]
        more = total - len(waiting)
        lists = {RUNNING: status["running_jobs"], PENDING: waiting, **dict.fromkeys(FINAL, finished)}
        if chosen_id and all(job["id"] != chosen_id for jobs in lists.values() for job in jobs):
            for job in find_kept(client, chosen_id, text):
                lists[job["status"]].append(job)
                more -= job["status"] == PENDING and (not job["group"] or bool(text))
        return list_top(status, waiting, more, groups, finished, paint)
    except NexusError as error:
        if error.kind != "unavailable" or not paint.height:
            raise
        lines = [paint("red", error.message), *([f"hint: {error.hint}"] if error.hint else [])]
        return [(line, "") for line in paint.join(lines).split("\n")]


def find_kept(client: Client, job_id: str, text: str) -> list[dict[str, Any]]:
    """[the job]; [] when it is not kept any more, or does not have the text."""
    try:
        job = client.job(job_id)
    except NexusError as error:
        if error.kind != "not_found":
            raise
        return []
    has_text = not text or job_id in {
        other["id"] for other in client.jobs(text=text, status=job["status"], fields="id")}
    return [job] if has_text else []


TOP_FIELDS = ("id", "name", "command", "user", "gpus", "position", "estimated_start", "waiting_for", "group",
              "sweep_values")                           # of what waits
TOP_KEYS = {"\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down", "\r": "\n"}
OWN_SCREEN, SHELL_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


class Top:
    """`nexus top` at a terminal: rows of jobs, of which one is chosen, and a line for messages and questions."""

    def __init__(self, context: Context) -> None:
        self.context, self.has_ended = context, False
        self.order = list[str]()                    # the ids of the jobs shown
        self.chosen, self.position = "", 0          # of these; the position serves when the job is no more shown
        self.text = self.message = ""               # `text`: the filter
        self.asked, self.question = "", ("", "")    # the job that may be ended; what is asked: its begin, the job
        self.is_typing = False                      # the filter

    def draw(self) -> None:
        paint = make_paint(self.context.out, self.context.environ)        # the window may have been resized
        width, room = paint.width, paint.height - 1
        rows = draw_top(self.context, Paint(paint.mark, max(1, width - 2), paint.height), self.text, self.chosen)
        self.order = list(dict.fromkeys(job_id for _, job_id in rows if job_id))
        if self.order:
            if self.chosen not in self.order:
                self.chosen = self.order[min(self.position, len(self.order) - 1)]
            self.position = self.order.index(self.chosen)
        at = next((number for number, (_, job_id) in enumerate(rows) if job_id and job_id == self.chosen), 0)
        offset = max(0, at + 1 - room)
        lines = [f"> {line}" if job_id and job_id == self.chosen else f"  {line}" for line, job_id in rows]
        if paint.mark:                              # the chosen one in reverse, without colours of its own
            lines = ["\x1b[7m" + re.sub(r"\x1b\[\d*m", "", line).ljust(width) + "\x1b[0m" if line[0] == ">" else line
                     for line in lines]
        hidden = len(lines) - room - offset
        last = (f"{time.strftime('%H:%M:%S')}  ? shows the keys, q ends" + (f"  /{self.text}" if self.text else "")
                + (f"  … {format_count(hidden, 'more line')}" if hidden > 0 else ""))
        if self.is_typing:
            last = f"/{self.text}"
        elif self.asked:
            last = self.format_question(width)
        lines = lines[offset:offset + room] + [""] * -hidden + [format_line(self.message or last)[:width]]
        self.context.write("\x1b[H" + "\n".join(f"\x1b[2K{line}" for line in lines) + "\x1b[J")

    def format_question(self, width: int) -> str:
        """The question, with as much of the job's name and command as there is room for."""
        (begin, what), end = self.question, ")? y or n"
        return begin + format_line(what, max(1, width - len(begin + end))) + end

    def press(self, key: str) -> None:
        if self.is_typing:
            self.is_typing = key not in ("\r", "\n", "\x1b")
            if key == "\x1b":
                self.text = ""
            elif key in ("\x7f", "\b"):
                self.text = self.text[:-1]
            elif key.isprintable():
                self.text += key
            return
        key = TOP_KEYS.get(key, key)
        step = {"up": -1, "down": 1}.get(key, 0)
        stopped, self.asked, self.message = self.asked, "", ""
        if stopped:
            self.act("yes" if key == "y" else "no", stopped)
        elif key == "q":
            self.has_ended = True
        elif key == "?":
            self.visit("help", "top")
        elif key == "/":
            self.is_typing = True
        elif self.order:
            self.chosen = self.order[max(0, min(self.order.index(self.chosen) + step, len(self.order) - 1))]
            self.act(key, self.chosen)

    def act(self, key: str, job_id: str) -> None:
        try:
            client = Client.find(self.context.environ, is_starting=False)
            if key == "\n":
                self.visit("show", job_id)
            elif key == "l":
                self.visit("logs", "-f", "-n", "100", job_id)
            elif key == "x":
                self.ask(client.job(job_id))
            elif key == "yes":
                ended = client.ask("POST", "/jobs/cancel", {"ids": [job_id], "status": [PENDING, RUNNING]})["jobs"]
                words = ["cancelled" if job["status"] in FINAL else "being stopped" for job in ended]
                self.message = f"job {job_id} is {words[0]}" if words else f"job {job_id} had ended before"
            elif key == "p":
                job = client.edit(job_id, is_held=not client.job(job_id)["is_held"])
                self.message = f"job {job_id} is {'held' if job['is_held'] else 'released'}"
            elif key == "r":
                self.message = f"job {job_id} runs again as {client.retry(ids=[job_id])[0]}"
        except NexusError as error:
            self.message = error.message

    def ask(self, job: Json) -> None:
        """Ask whether to end a job."""
        if job["status"] in FINAL:
            self.message = f"job {job['id']} is {job['status']}: there is nothing to stop"
        else:
            self.asked = job["id"]
            verb = "cancel" if job["status"] == PENDING else "stop"
            self.question = f"{verb} job {job['id']} (", name_or_command(job)

    def visit(self, *words: str) -> None:
        """Run another nexus command on the shell's screen, until q or Ctrl-C."""
        import subprocess
        self.context.write(SHELL_SCREEN)
        self.context.say(f"nexus {' '.join(words)}; q goes back")
        argv = [sys.executable, os.path.abspath(__file__), *words]
        child, is_over = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=dict(self.context.environ)), False
        try:
            while "q" not in read_keys(0.2):
                if child.poll() is not None and not is_over:
                    is_over = True
                    self.context.say("that is all; q goes back")
        except KeyboardInterrupt:
            pass
        finally:
            child.terminate()
            child.wait()
            self.context.write(OWN_SCREEN)

"""`nexus run` and `wait`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from shlex import quote

from ..machine.clock import wait_until
from ..machine.launchers import LAUNCHERS, NOT_OPENED, SESSION_OVER
from ..opening import TYPE_CHECKING
from ..server.log_routes import stamp_lines
from ..values.errors import NexusError
from ..values.job import COMPLETED, FINAL, PENDING, RUNNING, STATUSES
from ..values.text import is_job_id, refuse
from ..views.show import describe_end, describe_remedy, describe_seen_end
from ..views.status_text import local_time
from .attach import find_left, open_terminal, say_left
from .chosen import choose_ids
from .context import Context
from .submit import is_interactive, read_jobs, show_added, submit
from .terminal import write_to

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def exit_code_of(job: Json) -> int:
    """The exit code of `run` and `wait`: the job's own; 1 when it has none, or was stopped and ended with 0."""
    return int(job["exit_code"] or job["status"] != COMPLETED)


def say_remedy(context: Context, jobs: Iterable[Json]) -> None:
    """What may help the first of these jobs for which there is something."""
    if remedy := next(filter(None, map(describe_remedy, jobs)), ""):
        context.err.write(context.paint.join([f"hint: {remedy}"]))


def cmd_run(context: Context) -> int:
    jobs = read_jobs(context)
    if len(jobs) != 1:
        refuse(f"run takes one command, and these are {len(jobs)}", hint="nexus add queues them all")
    if is_interactive(context):
        check_interactive(context, jobs[0]["command"])
    answer = submit(context, jobs)
    if context.options.dry_run:
        show_added(context, answer)
        return 0
    job_id, = answer.get("ids") or [answer["id"]]
    try:
        context.say(f"job {job_id}")
        wait_until(lambda: context.client.job(job_id)["status"] != PENDING, 1.0, 0.05)
        if reason := context.client.job(job_id)["waiting_for"]:
            context.say(f"it waits: {reason}")
        if is_interactive(context) and (code := show_terminal(context, job_id)) is not None:
            return code
        try:
            if not pass_on_logs(context, context.client.follow(job_id)):
                write_to(context.err, b"\n")
        except NexusError as error:
            if error.kind != "not_found":
                raise
            context.say(error.message)                     # its end is told all the same
        job = context.client.wait([job_id])[0]
        context.say(describe_seen_end(job))
        say_remedy(context, [job])
        return exit_code_of(job)
    except (KeyboardInterrupt, BrokenPipeError) as end:     # Ctrl-C; `nexus run ... | head`
        with contextlib.suppress(BrokenPipeError):          # stderr goes there too
            job = context.client.job(job_id)
            follow = f"nexus attach {job_id}" if is_interactive(context) else f"follow it: nexus logs -f {job_id}"
            context.say(describe_end(job) if job["status"] in FINAL else
                        f"job {job_id} {'still waits' if job['status'] == PENDING else 'goes on'}; "
                        f"{follow}; stop it: nexus cancel {job_id}")
        return 130 if isinstance(end, KeyboardInterrupt) else 141           # 128 + SIGINT, SIGPIPE


def check_interactive(context: Context, command: str) -> None:
    """Raises: usage, where no job has a terminal that can be shown here."""
    line = f"nexus run --tty {quote(command)}"
    without = f"to see only its output: {line} </dev/null"
    if context.is_remote:
        refuse("NEXUS_URL is set, and a job's terminal is shown on the service's own machine", hint=(
            f"there: {line}; {without}"))
    status = context.client.status()
    if status["slurm"]:
        refuse("Slurm's jobs have no terminal to attach to", hint=f"srun --gres=gpu:1 --pty {command}; {without}")
    error = status["no_screen"]
    if error and not context.options.node:
        programs = [kind.program for kind in LAUNCHERS.values() if kind.program and error.startswith(kind.program)]
        refuse(f"{error}: jobs have no terminal to attach to", hint=(
            f"apt install {programs[0]}, then nexus restart; {without}" if programs else
            f'[jobs] launcher = "screen" gives them one: nexus config edit, nexus restart; {without}'))


def show_terminal(context: Context, job_id: str) -> int | None:
    """Show a job's terminal until it is left or the job has ended; return the exit code.

    None: the job has no terminal, or was over before that could be shown.  Its output says all then.
    """
    attempt = 0
    while True:
        job = await_begin(context, job_id)
        if job["status"] in FINAL or job["attempt"] == attempt:
            return None
        if not job["session"]:
            context.say(f"job {job_id} has no screen session on {job['node']}: this is its output alone")
            return None
        attempt, code = job["attempt"], open_terminal(context, job)
        if code == NOT_OPENED:
            return None
        job = find_left(context, job, code)
        say_left(context, job, code)
        if job["status"] in FINAL:
            return exit_code_of(job)
        if code != SESSION_OVER:
            return code


def await_begin(context: Context, job_id: str) -> dict[str, Any]:
    """The job, once its command runs or it has ended."""
    while True:
        job = context.client.job(job_id)
        if job["status"] in FINAL or (job["status"] == RUNNING and job["pid"]):
            return job
        time.sleep(0.3)


def describe_attempt(piece: Json) -> str:
    return f"attempt {piece['attempt']}, {local_time(piece['started_at'], '%Y-%m-%d %H:%M:%S')}"


def format_stamp(piece: Json) -> str:
    """When a piece of a log had come, as a line's beginning."""
    at = piece["at"]
    stamp = f"{local_time(at[:19] + 'Z', '%Y-%m-%d %H:%M:%S')}{at[19:21]}" if at else "-"
    return f"{stamp:21} "


def pass_on_logs(context: Context, pieces: Iterable[Json], has_times: bool = False, is_end: bool = False) -> bool:
    """Copy a job's stdout and stderr to ours, as they are.  `is_end`: these are the last lines as they are now.

    Returns whether the next line of stderr begins on a new line.
    """
    targets, attempt = {"stdout": context.out, "stderr": context.err}, 1
    last = {"stdout": b"\n", "stderr": b"\n"}               # the last byte of each
    for piece in pieces:
        name, content = piece["stream"], piece["text"].encode("utf-8", "surrogateescape")
        if piece["attempt"] != attempt and piece["has_earlier"]:
            context.say(describe_attempt(piece))
        elif "is_after_gap" in piece:
            write_to(targets[name], b"--\n")                # as grep has it
        attempt = piece["attempt"]
        if is_end:
            content = content.rstrip(b"\r")                 # of a line that goes on: what comes next would overwrite it
        if not content:
            continue
        former, last[name] = last[name], content[-1:]
        if has_times:
            content = stamp_lines(content, format_stamp(piece), former in b"\r\n")
        write_to(targets[name], content)
    return last["stderr"] == b"\n" and (last["stdout"] == b"\n" or not context.out.isatty())


def cmd_wait(context: Context) -> int:
    def is_meant(job: Json) -> bool:
        return job["status"] != COMPLETED and not job["retried_as"]

    ids = choose_ids(context, context.options.ids, STATUSES, is_meant, "no such job is left to wait for",
                     takes_both=True)
    ended, total = set[str](), len(set(ids))

    def say_end(job: Json) -> None:
        ended.add(job["id"])
        context.say(describe_end(job) + (f"; {len(ended)} of {total} have ended" if total > 1 else ""))

    # A name is looked up once: meanwhile another job may get it.
    ids = [job_id if is_job_id(job_id) else context.client.job(job_id)["id"] for job_id in ids]
    jobs = context.client.wait(ids, say_end, context.options.any)
    say_remedy(context, jobs)
    return next(filter(None, map(exit_code_of, jobs)), 0)

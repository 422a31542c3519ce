"""`nexus add`: commands, files, scripts and sweeps become submissions."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from shlex import quote

from ..formats.jobs_file import parse_commands
from ..formats.sbatch_options import translate_sbatch
from ..formats.scripts import find_foreign_directive, parse_directives
from ..machine.disk import FILE_BYTES, check_directory
from ..machine.git import find_work_tree, list_absent, take_snapshot
from ..machine.search_path import ROOT_FOLDERS, find_program, leave_out_hung
from ..opening import TYPE_CHECKING
from ..runner.environment import list_inherited
from ..service.validation import check_command
from ..values.errors import NexusError
from ..values.job import COMMAND
from ..values.schema import check, is_secret
from ..values.submission import ASKED
from ..values.sweep import parse_sweep, spread_sweep
from ..values.text import format_count, format_line, format_memory, format_ranges, format_time, join_some, parse_begin, refuse
from ..values.value import Field
from ..views.show import SHOW_LINES, UNIT_TEXTS
from .context import NONE, Context
from .other_queues import complete_command, find_script, join_command, read_script_text
from .parser import make_parser
from .terminal import unwinding
from .transport import DISK

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json


def make_options(context: Context) -> dict[str, Any]:
    """The body of POST /queue from the options, the environment and the current directory.  Raises: usage."""
    options, environ = context.options, list_variables(context)
    if options.snapshot:
        context.need_local("--snapshot keeps a work tree")
    if is_interactive(context):
        environ = {name: text for name, text in environ.items() if name not in TERMINAL_VARIABLES}
        environ["TERM"] = WINDOW_TERM
    body = read_fields(context, [name for name, row in ASKED.items() if row.flag])
    if not context.is_remote:
        # With --node, an absolute --cwd is of that machine.
        is_there = options.node and not options.snapshot and (options.cwd or "").startswith("/")
        body.update(environment=environ, cwd=options.cwd if is_there else find_cwd(options.cwd), umask=read_umask())
        nice, cpus = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
        if nice > 0:
            body["nice"] = nice
        if len(cpus) < (os.cpu_count() or 1):
            body["cpus"] = format_ranges(cpus)
        check_bash(context, (body.get("env") or {}).get("PATH") or environ.get("PATH") or os.defpath)
    return body


def list_variables(context: Context) -> dict[str, str]:
    """The variables of this shell that a job gets."""
    # A git hook that adds a job has these set; in the job they would point to another work tree.
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE") if context.options.snapshot else ()
    return {name: text for name, text in list_inherited(context.environ).items()
            if name not in ("CUDA_VISIBLE_DEVICES", *misleading)}


def read_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def check_bash(context: Context, path: str) -> None:
    """Raises: usage, when a job with this PATH cannot start: the service looks at no PATH but its own."""
    if any(folder in path.split(":") and find_program("bash", folder) for folder in ROOT_FOLDERS):
        return                                  # the usual case, without a child
    if find_program("bash", path) or leave_out_hung(path) != path:
        return
    if not context.client.status()["slurm"] and not context.client.nodes()[1:]:     # of others nothing is known
        refuse(f"bash was not found on the job's PATH, and runs each command: {format_line(path, 300)}",
               "add its folder to PATH (type bash shows it)")


WINDOW_TERM = "screen-256color"         # a window of screen understands this, whatever the terminal is that shows it
TERMINAL_VARIABLES = ("COLORTERM", "COLUMNS", "LINES", "TERMCAP")      # of the terminal that a command is typed at


def is_interactive(context: Context) -> bool:
    """Whether `run --tty` is typed at a terminal, which then shows the job's."""
    options = context.options
    return (options.subcommand == "run" and options.tty and not options.dry_run and sys.stdin.isatty()
            and context.out.isatty())


def read_fields(context: Context, names: Iterable[str]) -> dict[str, Any]:
    """{field of a job: its JSON} from those options that were given.  Raises: usage."""
    values = {name: getattr(context.options, name) for name in names}
    if isinstance(values["begin"], str):        # as UTC: the service may be in another time zone
        values["begin"] = format_time(parse_begin(values["begin"], time.time()))
    return {name: encode_option(ASKED[name], value) for name, value in values.items()
            if value is not None and value != []}


def encode_option(row: Field, value: Any) -> Any:
    """The JSON of an option's value; None for `none`."""
    if value is NONE or (row.repeats and value[-1] is NONE):
        return None
    if row.repeats:
        given = [each for each in value if each is not NONE]
        return dict(given) if row.takes_pairs else given
    return row.show(value) if row.show else value


def find_cwd(folder: str | None) -> str:
    try:
        path = os.path.abspath(folder) if folder else os.getcwd()
    except FileNotFoundError:
        refuse("the current directory has been deleted", hint="cd somewhere else, or use --cwd DIR")
    check_directory(DISK, "--cwd", path)
    return path


def read_jobs(context: Context) -> list[dict[str, Any]]:
    """What tells the jobs to add apart: the words or the lines of --file, for each combination of --sweep.

    Each is `{"command": …}`; with a sweep as in `each` of POST /queue.  Raises: usage.
    """
    commands, is_script = read_commands(context)       # also takes over a script's options
    if context.options.sweep:
        return spread_sweeps(context, commands, is_script)
    return [{"command": command} for command in commands]


def spread_sweeps(context: Context, commands: Sequence[str], is_script: bool) -> list[dict[str, Any]]:
    """A job for each combination of --sweep.  Options with placeholders are taken out of the call's.  Raises: usage."""
    options = context.options
    texts = {name: text for name in ("name", "group", "cwd") if (text := getattr(options, name))}
    spread = spread_sweep(options.sweep, commands, texts, dict(options.env), is_script)
    options.env = [(name, text) for name, text in options.env if name not in spread.variables]
    for name in spread.texts:
        setattr(options, name, None)
    if spread.unfilled:
        words = join_some([f"{{{word}}}" for word in spread.unfilled])
        context.say(f"{words} stays as it is, as no --sweep has that name")
    is_path = "cwd" in spread.texts and not context.is_remote
    if not is_path:
        return [dict(row) for row in spread.rows]
    cwd = os.path.abspath(texts["cwd"])
    return [{**row, "cwd": find_cwd(row["cwd"]), "template": {**row["template"], "cwd": cwd}} for row in spread.rows]


def read_given(path: str) -> str:
    """The text of a file that a person names: it may be a pipe, which ends; or with `-` standard input.

    Raises: OSError.
    """
    import errno
    with open(0 if path == "-" else path, encoding="utf-8", errors="surrogateescape", closefd=path != "-") as file:
        text = file.read(FILE_BYTES + 1)
    if len(text) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {format_memory(FILE_BYTES / 2**20)}")
    return text


def read_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """The name and values of a --sweep, some of which may stand in a file.  Raises: usage."""
    def read_lines(path: str) -> list[str]:
        try:
            return read_given(os.path.expanduser(path)).splitlines()
        except OSError as error:
            refuse(f"sweep {format_line(text, 60)}: cannot read {path}: {error.strerror}",
                   hint=f"@FILE gives a value a line; for the value @{path} itself: @@{path}")

    return parse_sweep(text, read_lines)


def read_commands(context: Context) -> tuple[list[str], bool]:
    """(the command, or the lines of --file; whether it runs a script).  Raises: usage."""
    words, path = context.options.command, context.options.file
    if path is None:
        line = join_command(words)
        first, _, rest = line.partition(" ")
        script = find_script(first, context.options.cwd)
        if script and not context.is_remote:
            return [read_script(context, script, first, rest)], True
        if words in ([], ["-"]):
            refuse("there is no command", hint=f'nexus {context.options.subcommand} "python train.py"; '
                   "a list of commands, one a line: nexus add --file -")
        if os.path.isfile("/dev/stdin") and os.lseek(0, 0, os.SEEK_CUR) == 0 < os.fstat(0).st_size:
            context.say("what is piped in here does not reach the job: name the file in the command, like "
                        "'python train.py < data'")
        unread = script or rest.partition(" ")[0]               # as in `bash job.sh`
        text = read_script_text(unread)
        if parse_directives(text):
            typed = f"nexus {context.options.subcommand} {quote(rest)}"
            how = " over NEXUS_URL" if context.is_remote else f"; type: {typed}"
            context.say(f"the options in {unread} are not read{how}")
        say_foreign_directive(context, unread, text)
        if "/" in first and not context.is_remote and not context.options.node and os.path.isdir(
                os.path.join(context.options.cwd or "", first)):
            refuse(f"{first} is a directory, and no command", hint=f"--cwd {quote(first)} runs a command in it")
        whole = complete_command(line, context.options.cwd or "")
        if whole != line and not context.is_remote:
            refuse(f"{first} is a file, and no command", hint=f"nexus add --file {quote(first)} adds its lines"
                   if first.endswith(".txt") else f"nexus {context.options.subcommand} {quote(whole)}")
        is_missing = re.fullmatch(r"\S+\.(sh|py|slurm|sbatch)|\./\S+", line) and not find_program(line) and (
            not os.path.exists(os.path.join(context.options.cwd or "", line)))
        if is_missing and not context.is_remote and not context.options.node:
            context.say(f"there is no file {line} yet: the job fails if there is none when it starts")
        return [line], False
    if words:
        refuse("give a command or --file, not both")
    try:
        text = read_given(path)
    except OSError as error:
        refuse(f"cannot read {path}: {error.strerror}",
               hint="--file takes a file with one command a line, or - for standard input")
    if text.startswith("#!") or path.endswith(".py"):
        refuse(f"{path} is a script, and --file takes a list of commands, one a line",
               hint='nexus add job.sh, or nexus add "python train.py"')
    commands = parse_commands(text)
    if not commands:
        refuse(f"{path} holds no command", hint="one a line; empty lines and those that begin with # are left out")
    for number, command in commands:
        try:
            check(COMMAND, command, "the command")
            check_command(command)
        except NexusError as error:
            refuse(f"line {number}, '{format_line(command, 100)}': {error.message}", error.hint)
    return [command for _, command in commands], False


def say_foreign_directive(context: Context, path: str, text: str) -> None:
    if mark := find_foreign_directive(text):
        context.say(f"{path}: nexus does not read {mark} lines; give it what they ask for as options, like --gpus 2 "
                    "--timeout 2h, or as #NEXUS lines")


def read_script(context: Context, path: str, first: str, rest: str) -> str:
    """The command that runs a script.  Its options are taken into those of the context, which win.  Raises: usage."""
    import argparse
    import shlex
    options, parser, text = context.options, make_parser(context.options.chosen), read_script_text(path)
    given, ignored = argparse.Namespace(), list[str]()
    for number, mark, line in parse_directives(text):
        try:
            words = shlex.split(line, comments=True)
            parser.parse_args(words if mark == "NEXUS" else translate_sbatch(words, ignored), given)
            if given.command or given.file:
                refuse(f"{given.command[0] if given.command else '--file'} is not an option of a script")
        except ValueError as error:                                                 # shlex's
            refuse(f"{path}, line {number}: {error}")
        except NexusError as error:
            message = error.message.replace(f"{options.subcommand}: ", "", 1)
            raise NexusError(error.kind, f"{path}, line {number}: {message}", error.hint) from None
    for name, value in vars(given).items():
        default, ours = parser.get_default(name), getattr(options, name)
        if isinstance(default, list):
            setattr(options, name, [pair for pair in value if pair[0] not in dict(ours)] + ours)
        elif ours == default:
            setattr(options, name, value)
    for pattern, note in SCRIPT_NOTES:
        if (match := re.search(pattern, text)) and not context.client.status()["slurm"]:
            context.say(f"{path}: {match.expand(note)}")
    if ignored:
        context.say(f"{path}: nexus does without {', '.join(dict.fromkeys(ignored))}")
    say_foreign_directive(context, path, text)
    is_array = "task" in dict(options.sweep)
    options.group = options.group or (is_array and (options.name or os.path.basename(path))) or None
    is_here = os.path.realpath(os.path.join(options.cwd or "", first)) == os.path.realpath(path)
    script = first if is_here else quote(os.path.abspath(path))
    program = re.match("#!(?:/usr/bin/env (?:-S )?)?(.*)", text)
    if not (program and "/" in script and os.access(path, os.X_OK)):
        script = f"{program[1].strip() if program else 'bash'} {script}"
    return " ".join(filter(None, ["SLURM_ARRAY_TASK_ID={task}" if is_array else "", script, rest]))


def cmd_add(context: Context) -> None:
    show_added(context, submit(context, read_jobs(context)))


# (what a command has, what is said of it)
COMMAND_NOTES = (
    ("CUDA_VISIBLE_DEVICES=", "the command sets CUDA_VISIBLE_DEVICES, by which nexus gives a job its GPUs: without it, "
     "the job uses those; --gpu-ids 3 asks for GPU 3"),
    (r"(?s)^(?!.*(?:conda\.sh|bin/activate|hook)).*?\b((?:micro)?mamba|conda) activate ([^\s;&|]+)",
     r"\1 activate is for a terminal, and a job has none: leave it out, and say --conda \2"))
# A program that is given nothing but what is typed
TYPED_TO = (r"(?:\S*/)?(?:(?:(?:ba|z|fi|da|k|c|tc)?sh|i?python[\d.]*|R|julia|node)(?:\s+(?:-[ilq]+|--login|--no\w+))*"
            r"|(?:n?vim?|nano|htop|nvtop)(?:\s+[^-\s]\S*)*)")
# (what a script has, what is said of it, where no Slurm runs the jobs)
SCRIPT_NOTES = (
    (r"(?m)^[ \t]*(?:exec |time )*srun\b", "it calls srun, which has Slurm start programs: nexus has started it, so "
     "leave srun out"),
    (r"\$\{?(SLURM_(?!ARRAY_TASK_ID\b)\w+)", r"it reads $\1, which only Slurm sets: NEXUS_JOB_ID, NEXUS_GPU_ID and, of "
     "an array, NEXUS_SWEEP_task tell a job's id, GPUs and task here"))


def submit(context: Context, jobs: Sequence[Json]) -> dict[str, Any]:
    """Submit what read_jobs() returned, or check it with --dry-run, and warn."""
    options = context.options
    is_one = options.file is None and not options.sweep
    body = {**make_options(context), **(jobs[0] if is_one else {"each": jobs}), "dry_run": options.dry_run}
    if options.snapshot:
        body.update(keep_work_tree(context, body["cwd"], [job["command"] for job in jobs[:MAX_NOTED_COMMANDS]]))
    answer = context.client.submit(body)
    for job_id in answer.get("known", ()):
        context.say(f"job {job_id} is the same and is there already: nothing was added for it")
    typed_to = next((job["command"] for job in jobs if re.fullmatch(TYPED_TO, job["command"])), None)
    if typed_to and not is_interactive(context):
        context.say(f"{typed_to} waits for what is typed: at a terminal, nexus run --tty {quote(typed_to)} is an "
                    "interactive job; nexus attach ID reaches one that runs")
    for pattern, note in COMMAND_NOTES:
        if match := next(filter(None, (re.search(pattern, job["command"]) for job in jobs)), None):
            context.say(match.expand(note))
    if context.is_remote and not options.cwd:
        context.say(f"it runs in the home directory at {context.client.host}, with the environment there; "
                    "--cwd DIR names another")
    return answer


MAX_NOTED_COMMANDS = 1000       # of a sweep


def keep_work_tree(context: Context, folder: str, commands: Sequence[str]) -> dict[str, str]:
    """The fields of a job that runs the work tree of a folder as it is now; with --dry-run, nothing is kept.

    What the commands name and the snapshot lacks is said.
    """
    cwd = os.path.realpath(folder)
    if context.options.dry_run:
        find_work_tree(cwd, context.environ)
        return {"cwd": cwd}
    with unwinding():
        snapshot = take_snapshot(cwd, context.own_environ)
        absent = list_absent(DISK, snapshot, cwd, context.own_environ, commands)
    if absent:
        path = os.path.normpath(os.path.join(cwd, absent[0]))
        context.say(f"the snapshot lacks {join_some(absent)}: files that git ignores, and other repositories, are not "
                    f"in it; name it by its whole path, {path}")
    return {"cwd": cwd, "snapshot": snapshot.commit, "snapshot_repo": snapshot.repository}


def show_added(context: Context, answer: Json) -> None:
    if "warning" in answer:
        context.say(answer["warning"])
    if context.options.dry_run:
        asked = read_fields(context, [name for name, row in ASKED.items() if row.flag])
        show_tried(context, answer["jobs"], describe_changes(asked))
    else:
        context.show(answer, lambda answer, paint: paint.join(answer.get("ids") or [answer["id"]]))


def show_tried(context: Context, jobs: Sequence[Json], asked: str) -> None:
    """Show what a dry run would add; `asked`: by which options."""
    context.show(jobs, lambda jobs, paint: paint.join([
        f"{job['retry_of']}: {job['command']}" if "retry_of" in job else job["command"] for job in jobs]))
    context.say(f"{format_count(len(jobs), 'job')} would be added{asked and ', with '}{asked}; this was a dry run: "
                "nothing was done")


def describe_changes(change: Json) -> str:
    """`GPUs 2, after abc`; of what is secret, the names; of a whole environment that it is this shell's."""
    told = ["this shell's variables and umask"] if "environment" in change else []
    for name, value in change.items():
        if "environment" in change and name in ("environment", "umask"):
            continue
        line, unit = SHOW_LINES["Asked for"].get(name, (f"{name}: {{}}", "text"))
        told.append(line.replace(":", "", 1).format("none" if value in (None, [], (), {}) else UNIT_TEXTS[unit](
            list(value) if is_secret(ASKED[name].schema) else value)))
    return ", ".join(told)

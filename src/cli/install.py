"""`nexus install`, completion and help."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from shlex import quote

from .. import text_of
from ..machine.disk import disk_errors, read_bytes, write_atomic
from ..machine.layout import expand_user
from ..machine.programs import run
from ..machine.search_path import find_program
from ..values.errors import NexusError
from ..values.job import PRIORITIES, STATUSES
from ..values.text import fill_marks, refuse
from .client import Client
from .context import Context, Subcommand
from .other_queues import ALIASES
from .parser import find_command, make_parser
from .transport import DISK

# What `nexus help` shows: what is used daily, on a terminal of 24 lines
DAILY = ("add", "run", "status", "top", "queue", "jobs", "history", "show", "why", "logs", "wait", "cancel", "retry",
         "edit", "results", "pause", "resume", "open")
FOR_SCRIPTS = ("screens", "metrics", "serve")           # and of other tools


def cmd_help(context: Context) -> None:
    """Print what is used daily; the rest with `more`; or the help of one command."""
    import textwrap
    topic, commands = context.options.topic, [command for command in context.commands if command.summary]
    if topic == "more":
        words = ", ".join([*(f"{word} = {' '.join(ours)}" for word, ours in ALIASES.items()), "stop ID = cancel ID"])
        return context.print(
            "nexus help more: what is not used daily", "",
            *list_commands(command for command in commands if command.name not in (*DAILY, *FOR_SCRIPTS)), "",
            "For scripts, and in place of other tools:", "",
            *list_commands(command for command in commands if command.name in FOR_SCRIPTS),
            "  status --detailed  the queue by priority, readings of GPUs and host, health",
            "  status --watch     nexus top", "",
            *textwrap.wrap(f"Words that you may know, and what they do: {words}", 79), "",
            *textwrap.wrap(
                "nexus --version prints the version and the file's hash.  Exit codes: 0; 1 internal, unhealthy; 2 "
                "usage; 3 not found; 4 conflict; 5 forbidden; 6 unavailable.  NEXUS_HOME moves ~/.nexus; "
                "NEXUS_MOCK_GPUS=2 makes up two GPUs, for a trial; NO_COLOR=1: no colours.", 79))
    if topic is not None:
        return context.write(make_parser(find_command([topic], context.commands)).format_help())
    context.print(
        "nexus: a queue for the GPUs of this machine", "",
        *list_commands(command for command in commands if command.name in DAILY), "",
        "nexus help COMMAND explains one; nexus help more lists the others, like health,",
        "clear, node and config, and the words of other tools, like squeue and ls")


def list_commands(commands: Iterable[Subcommand]) -> list[str]:
    return [f"  {command.name:<9} {command.summary}" for command in commands]


def cmd_complete(context: Context) -> None:
    """For shells: the completions of the last word.  It starts no service and reports no error."""
    *before, begun = context.options.words or [""]
    # --group=exp1 is one word, but three for bash.
    flag, begun = re.findall("(?s)^(--[^=]+=)?=?(.*)", begun)[0]
    names, comma, begun = begun.rpartition(",")
    words = list_completions(context, [word for word in (*before, flag[:-1]) if word not in ("", "=")], begun)
    harmless = [word for word in words if re.fullmatch(r"[\w.:-]+", word)]      # bash expands a completion
    context.print(*(f"{flag}{names}{comma}{word}" for word in harmless if word.startswith(begun)))


def list_completions(context: Context, before: Sequence[str], begun: str) -> list[str]:
    """What may follow these words: commands, options, an option's values, ids; nothing where a file or text does."""
    if not before or before == ["help"]:
        return [each.name for each in context.commands if each.summary] + ["more"] * len(before)
    name = ALIASES.get(before[0], before)[0]
    command = next((each for each in context.commands if each.name == name), Subcommand("", ""))
    if command.verbs and len(before) == 1:
        return [verb.name for verb in command.verbs]
    command = next((verb for verb in command.verbs if verb.name == before[1]), command)
    arguments = {flag: settings for flags, settings in command.arguments for flag in flags}
    if begun.startswith("-"):
        return [flag for flag in arguments if flag.startswith("--")]
    name = next((flag for flag in arguments if not flag.startswith("-")), "")
    if arguments.get(before[-1], {"action": "none"}).get("action", "extend") in ("append", "extend"):
        name = before[-1]                   # an option that takes a value
    fixed = {"--status": STATUSES, "--priority": PRIORITIES}.get(name) or arguments.get(name, {}).get("choices")
    if fixed:
        return list(fixed)
    with contextlib.suppress(NexusError, OSError):
        client = Client.find(context.environ, is_starting=False)
        if name in ("group", "--group", "--set-group", "--after-group", "--after-any-group"):
            return [group["name"] for group in client.ask("GET", "/groups")]
        if name in ("--after", "--after-any", "--before", "ids", "targets"):
            return [job["id"] for job in client.jobs(limit=1000, fields="id")]
    return []


# nexus install

LAUNCHER = text_of("launcher.sh")
PYTHON_CHECK = "import http.server, sys; sys.exit(sys.version_info < (3, 9))"       # it is complete, and not too old
UNIT = text_of("nexus.service")
BASH_COMPLETION = text_of("completion.bash")
ZSH_COMPLETION = text_of("completion.zsh")
FISH_COMPLETION = text_of("completion.fish")


def cmd_install(context: Context) -> None:
    """Put `nexus` on PATH with its completion; with --boot, have the service started at boot."""
    home = expand_user(context.environ.get("HOME") or "~")
    base = context.environ.get("XDG_DATA_HOME") or os.path.join(home, ".local", "share")
    binaries = os.path.join(home, ".local", "bin")
    script = os.path.join(base, "nexus", "nexus.py")
    python, note = choose_python()
    launcher = fill_marks(
        LAUNCHER, PYTHON=quote(python), FOLDER=quote(os.path.dirname(script)), CHECK=quote(PYTHON_CHECK))
    install_file(script, read_bytes(DISK, os.path.abspath(__file__)).decode(), 0o755)
    program = os.path.join(binaries, "nexus")
    install_file(program, launcher, 0o755)
    settings = context.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    functions = os.path.join(base, "zsh", "site-functions")
    install_file(os.path.join(base, "bash-completion", "completions", "nexus"), BASH_COMPLETION)
    install_file(os.path.join(settings, "fish", "completions", "nexus.fish"), FISH_COMPLETION)
    install_file(os.path.join(functions, "_nexus"), ZSH_COMPLETION)
    run([program, "--version"], 60, environ=context.environ)       # compiles it, so that no later command must
    context.say(f"installed {program}, run by {python}{note}, with completion for bash, fish and zsh")
    if find_program("zsh"):
        context.say(f"zsh needs this line in ~/.zshrc, before compinit:  fpath+=({quote(functions)})")
    if binaries not in context.environ.get("PATH", "").split(":"):
        line = f'export PATH="{binaries}:$PATH"'
        context.say(f"{binaries} is not on PATH yet: add  {line}  to ~/.profile and log in again")
    context.say(f"ssh reads no ~/.profile for a command:  ssh {socket.gethostname()} "
                "'~/.local/bin/nexus add \"python train.py\"'")
    if context.options.boot:
        install_boot(context, home, program)


def choose_python() -> tuple[str, str]:
    """(the Python that is to run `nexus`, what is to be said of it).

    A virtual environment may be moved or removed, and uv's cleans up its own.  So a Python outside is taken, if it has
    the modules that this one has.
    """
    from importlib.util import find_spec
    if sys.prefix == sys.base_prefix:
        return sys.executable, ""
    needed = [names for names in (("psutil",), ("tomllib", "tomli")) if any(map(find_spec, names))]
    test = (f"from importlib.util import find_spec; all(any(map(find_spec, names)) for names in {needed}) or exit(1); "
            f"{PYTHON_CHECK}")
    for python in ("/usr/bin/python3", "/usr/local/bin/python3", getattr(sys, "_base_executable", "")):
        with contextlib.suppress(NexusError):
            if os.access(python, os.X_OK) and run([python, "-E", "-c", test], 10).exit_code == 0:
                return python, ""
    lacks = " and ".join(" or ".join(names) for names in needed) or "what it needs"
    return sys.executable, f" of a virtual environment, as no Python outside has {lacks}"


def install_file(path: str, text: str, mode: int = 0o644) -> None:
    """Raises: unavailable."""
    with disk_errors("write", path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_atomic(DISK, path, [text], mode)
        os.chmod(path, mode)


def quote_for_systemd(text: str) -> str:
    """A word of a unit.  Source: systemd.syntax(7), systemd.unit(5)."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def install_boot(context: Context, home: str, program: str) -> None:
    """Start the service at boot by a systemd user unit; without a user manager, print a line for cron."""
    base = context.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    unit = os.path.join(base, "systemd", "user", "nexus.service")
    for text in (program, context.layout.home):
        if "\n" in text:
            refuse(f"{text!r} has a line break: neither systemd nor cron takes it", hint="")
    install_file(unit, fill_marks(
        UNIT, PROGRAM=quote_for_systemd(program).replace("$", "$$"),
        HOME=quote_for_systemd(f"NEXUS_HOME={context.layout.home}")))
    try:
        is_enabled = not any(run(["systemctl", "--user", *words], 15).exit_code
                             for words in (["daemon-reload"], ["enable", "nexus.service"]))
    except NexusError:                                  # there is no systemctl
        is_enabled = False
    if not is_enabled:
        context.say("there is no systemd user manager here; this line starts the service at boot, after crontab -e:")
        line = f"NEXUS_HOME={quote(context.layout.home)} {quote(program)} start"
        return context.print("@reboot " + line.replace("%", "\\%"))       # cron's line ends at a %
    context.say(f"the service starts with your systemd user manager: {unit}; loginctl enable-linger starts that "
                "at boot instead of at your first login, and lets it and the jobs outlive your logout")

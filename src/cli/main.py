"""main(argv, environ, out, err) -> exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from shlex import quote

from ..machine.disk import read_json
from ..machine.layout import find_home
from ..machine.processes import PROC, read_proc_words
from ..opening import TYPE_CHECKING, __version__
from ..service.service import file_hash
from ..values.errors import NexusError
from ..values.text import format_line
from ..views.status_text import Paint
from .chosen import split_ids
from .commands import COMMANDS
from .context import Context
from .other_queues import ALIASES
from .parser import find_command, parse_words
from .terminal import make_paint
from .transport import DISK, describe_stranger

if TYPE_CHECKING:
    from typing import TextIO


def run_command(context: Context) -> int:
    """Raises: what the command does; a hint how to choose what was named here is of this very command."""
    options = context.options
    try:
        for name in ("ids", "targets"):
            if words := getattr(options, name, None):
                setattr(options, name, [part for word in words for part in split_ids(context, word)])
        return options.chosen.run(context) or 0
    except NexusError as error:
        named = getattr(options, "ids", None) or getattr(options, "targets", None) or []
        if any(error.hint.endswith(f" {quote(word)}") for word in named):
            error.hint = error.hint.replace("nexus jobs --", f"nexus {options.subcommand} --")
        raise


def main(argv: Sequence[str], environ: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    """Run the command line; return its exit code."""
    try:
        if argv and argv[0] in ("--version", "-V", "version"):
            out.write(f"nexus {__version__} ({file_hash(DISK)})\n")
            return 0
        words = ["help", *argv[1:2]] if argv and argv[0] in ("--help", "-h") else list(argv)
        if not words or words[0].startswith("-"):
            words = ["status", *words]
        if words[0] == "help" and words[2:]:
            words = [*words[1:], "--help"]      # nexus help node add
        if words[0] == "stop" and words[1:] and not words[1].startswith("-"):
            words[0] = "cancel"                 # whoever names a job does not mean the service
        command = find_command(words, COMMANDS)
        ours = ALIASES.get(words[0], [""])[1:]
        if not any(word.partition("=")[0] in ours for word in words[1:]):       # `squeue --status failed`
            words[1:1] = ours
        context = Context(parse_words(command, words[1:], out), environ, out, err, COMMANDS)
        context.need_local(command.local)
        return run_command(context)
    except NexusError as error:
        return tell_error(error, environ, err)
    except SystemExit as end:               # argparse's --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                 # `nexus jobs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if environ.get("NEXUS_URL"):            # most likely another program has sent what could not be read
            message = format_line(f"{type(error).__name__}: {error}", 200)
            return tell_error(describe_stranger(environ["NEXUS_URL"], message), environ, err)
        with contextlib.suppress(NexusError):
            running = read_json(DISK, os.path.join(find_home(DISK, environ), "service.json"))
            if running and running.get("hash") != file_hash(DISK) and argv[:1] != ["serve"]:
                return tell_error(NexusError("unavailable", "the service that runs is of another nexus.py",
                                             hint="nexus restart, with this one; jobs go on"), environ, err)
        import traceback
        err.write(Paint("").join(["nexus: this is a fault of nexus itself; please report it with what follows",
                                  *traceback.format_exc().rstrip("\n").split("\n")]))
        return 1


def tell_error(error: NexusError, environ: Mapping[str, str], err: TextIO) -> int:
    paint = make_paint(err, environ)
    err.write(paint.join([f"nexus: {paint('red', error.message)}", *([f"hint: {error.hint}"] if error.hint else [])]))
    return error.exit_code


# `uv run nexus.py` and `uvx` make an environment for nexus alone, and put it before the user's; `pipx run` calls uv.
UV_ENVIRONMENT = r".*/(environments|archive|builds)-v\d+/[^/]+"         # in uv's cache, wherever that is
UV_VARIABLES = ("PATH", "VIRTUAL_ENV", "UV", "UV_RUN_RECURSION_DEPTH")


def leave_wrapper(environ: Mapping[str, str], prefix: str, parent: str, before: Mapping[str, str]) -> Mapping[str, str]:
    """The environment as it was before uv.  One that the user has activated, or a project's .venv, is no wrapper's.

    `prefix`: of this Python; `parent`: the program that started it; `before`: the environment of that.
    """
    is_own = re.fullmatch(UV_ENVIRONMENT, prefix) or os.path.exists(f"{prefix}/uv-receipt.toml")        # of `uv tool`
    is_first = environ.get("PATH", "").startswith(f"{prefix}/bin:")
    if not (is_own and is_first and os.path.basename(parent) in ("uv", "uvx") and "PATH" in before):
        return environ
    kept = {name: text for name, text in environ.items() if name not in UV_VARIABLES}
    return {**kept, **{name: before[name] for name in UV_VARIABLES if name in before}}


def find_user_environ() -> Mapping[str, str]:
    """The environment in which a command was typed."""
    if sys.prefix == sys.base_prefix:               # this is no virtual environment: most are at once done
        return os.environ
    try:
        parent = os.readlink(f"{PROC}/{os.getppid()}/exe")
    except OSError:
        return os.environ
    before = dict(word.partition("=")[::2] for word in read_proc_words(os.getppid(), "environ"))
    return leave_wrapper(os.environ, sys.prefix, parent, before)


def entry() -> int:
    """The entry point of the `nexus` command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:          # closed: no file opened later may get its number
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = main(sys.argv[1:], find_user_environ(), sys.stdout, sys.stderr)
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:                         # reported already; the interpreter would report it again
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return code


if __name__ == "__main__":
    sys.exit(entry())

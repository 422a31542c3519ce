"""What a command is, and what it is called with: one function each, (context) -> exit code; None is 0.

Data goes to stdout, messages to stderr.  The table COMMANDS says what each command takes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence

from ..machine.layout import Layout, find_home
from ..machine.search_path import complete_path
from ..opening import TYPE_CHECKING
from ..values.config import is_usual
from ..values.errors import NexusError
from ..values.schema import parse_field, parse_repeated
from ..values.text import format_line, refuse
from ..values.value import Field, Value
from ..views.status_text import Paint
from .client import Client
from .terminal import make_paint, write_to
from .transport import DISK

if TYPE_CHECKING:
    import argparse
    from typing import Any, TextIO


class Context:
    """One run of the command line: its options, streams and environment."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str], out: TextIO, err: TextIO,
                 commands: Sequence[Subcommand]) -> None:
        self.options, self.environ, self.out, self.err, self.commands = options, environ, out, err, commands
        self.is_remote = bool(environ.get("NEXUS_URL"))
        self.paint = make_paint(out, environ)

    @functools.cached_property
    def client(self) -> Client:
        """The client; starts the service unless it runs."""
        client = Client.find(self.environ)
        if client.has_started and not is_usual(client.url):
            self.say(f"the service runs at {client.url}")
        return client

    def print(self, *lines: str) -> None:
        self.write(self.paint.join(lines))

    def write(self, text: str) -> None:
        write_to(self.out, text)

    def show(self, data: Any, make_text: Callable[[Any, Paint], str], when_empty: str = "") -> None:
        """Write data as JSON with --json, else as text; `when_empty` is the message when there is none."""
        if self.options.json:       # JSON escapes all other unprintable characters itself
            self.write(json.dumps(data, indent=2).replace("\x7f", "\\u007f") + "\n")
        elif data or not when_empty:
            self.write(make_text(data, self.paint))
        else:
            self.say(when_empty)

    def need_local(self, what: str) -> None:
        """Raises: usage, when NEXUS_URL names another machine's service."""
        if what and self.is_remote:
            refuse(f"NEXUS_URL is set, and {what} on the service's own machine", hint="ssh there; or unset NEXUS_URL")

    def say(self, text: str) -> None:
        """Write a message to stderr."""
        self.err.write(f"nexus: {format_line(text)}\n")
        self.err.flush()

    @property
    def own_environ(self) -> dict[str, str]:
        """The environment of the programs that nexus itself runs."""
        return {**self.environ, "PATH": complete_path(DISK, self.layout, self.environ.get("PATH"))}

    @property
    def layout(self) -> Layout:
        """This machine's files, without those that config.toml can move."""
        return Layout(find_home(DISK, self.environ), "", "")


def argument(*flags: str, row: Field | None = None, takes_none: bool = False,
             **settings: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of one add_argument() call.  `row` says what the text must be; `takes_none`: it may be `none`."""
    if row is None:
        return flags, settings
    if row.repeats:
        settings = {**settings, "action": "extend", "default": [] if row.takes_pairs else None}
    parse = parse_change if takes_none else parse_option
    return flags, {**settings, "type": functools.partial(parse, row, flags)}


def parse_option(row: Field, flags: Sequence[str], text: str) -> Any:
    """Raises: usage, with the option's names."""
    name = "/".join(flags)
    try:
        return parse_repeated(row, text, name) if row.repeats else parse_field(row, text, name)
    except NexusError as error:
        message = error.message if name in error.message else f"{name}: {error.message}"
        raise NexusError(error.kind, message, error.hint or (row.like and f"like {flags[0]} {row.like}")) from None


def parse_change(row: Field, flags: Sequence[str], text: str) -> Any:
    """The value of an option of `edit` and `retry`; NONE for `none`.  Raises: usage, with the option's names."""
    if text == "none":
        return [NONE] if row.repeats else NONE
    return parse_option(row, flags, text)


NONE = object()                 # of an option: it takes away what was set


class Subcommand(Value):
    name: str
    summary: str                # its line in `nexus help`; empty: it is not listed there
    run: Callable[[Context], int | None] | None = None     # None: a verb is required
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    description: str = ""
    verbs: tuple[Subcommand, ...] = ()     # subcommands
    examples: tuple[str, ...] = ()      # without the word nexus
    local: str = ""             # what needs the service's own machine; empty: NEXUS_URL may be set

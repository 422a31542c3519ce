"""argparse from the table COMMANDS."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from shlex import quote

from ..formats.sbatch_options import explain_sbatch
from ..machine.search_path import find_program
from ..opening import TYPE_CHECKING
from ..values.choice import CHANGES
from ..values.errors import NexusError
from ..values.text import format_line, refuse, suggest
from .context import Subcommand, parse_option
from .other_queues import (
    ALIASES,
    FOREIGN,
    SINGLE_OPTIONS,
    SWITCHES,
    complete_command,
    join_command,
    translate_scontrol,
    translate_word,
)

if TYPE_CHECKING:
    import argparse
    from typing import NoReturn, TextIO


def find_command(words: Sequence[str], commands: Sequence[Subcommand]) -> Subcommand:
    """Raises: usage; the hint is what to type, or the nearest name."""
    name, first = words[0], words[0].partition(" ")[0]
    for command in commands:
        if command.name == ALIASES.get(name, [name])[0]:
            return command
    hint = (translate_scontrol(words[1:]) if name == "scontrol" else "") or FOREIGN.get(f"nexus {name}")
    if not hint and (find_program(first) or os.path.isfile(first)):
        hint = f"to queue it: nexus add {quote(complete_command(join_command(words)))}"
    hint = hint or suggest(name, [command.name for command in commands if command.summary])
    hint = hint or f"nexus help and nexus help more list them; of a job: nexus show {quote(format_line(name, 40))}"
    raise NexusError("usage", f"'{format_line(name, 40)}' is not a command", hint)


def make_parser(command: Subcommand) -> argparse.ArgumentParser:
    import argparse
    takes_command = command.name in ("add", "run")

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            unknown, hint = re.match("unrecognized arguments: ([^ =]+)", message), ""
            if unknown and unknown[1][0] == "-":
                hint = suggest(unknown[1], self._option_string_actions)
            elif unknown and command.name in ("jobs", "history", "queue", "status", "top"):
                hint = f"nexus show {unknown[1]}"
            raise NexusError("usage", f"{command.name}: {message}", hint)

        def format_help(self) -> str:
            lines = [f"  nexus {example}\n" for example in command.examples]
            self.formatter_class = argparse.HelpFormatter
            return super().format_help() + ("\nexamples:\n" + "".join(lines) if lines else "")

    parser = Parser(prog=f"nexus {command.name}",
                    description=f"{command.summary[:1].upper()}{command.summary[1:]}. {command.description}",
                    allow_abbrev=False,
                    usage=f'nexus {command.name} [options] "COMMAND"' if takes_command else None,
                    # A formatter is made for each argument; without a width it imports shutil, for 5 ms
                    formatter_class=functools.partial(argparse.HelpFormatter, width=80))
    parser.set_defaults(json=False, chosen=command, subcommand=command.name)
    single = SINGLE_OPTIONS.get(command.name, ())
    exclusive = parser.add_mutually_exclusive_group(required=command.name == "move") if single else parser
    for flags, settings in command.arguments:
        (exclusive if flags[0] in single else parser).add_argument(*flags, **settings)
    if command.verbs:
        verbs = parser.add_subparsers(required=not command.run, metavar="|".join(verb.name for verb in command.verbs))
        for verb in command.verbs:
            verb_parser = verbs.add_parser(verb.name, help=verb.summary, allow_abbrev=False)
            verb_parser.set_defaults(chosen=verb)
            for flags, settings in verb.arguments:
                verb_parser.add_argument(*flags, **settings)
    return parser


def parse_words(command: Subcommand, words: Sequence[str], out: TextIO) -> argparse.Namespace:
    """Raises: usage; SystemExit, after --help."""
    if command.name in ("retry", "edit") and "--" in words:
        return parse_again(command, words, words.index("--"), out)
    if command.name == "results" and "--order" in words[:-1]:
        at = words.index("--order")                 # argparse takes `--order -acc` for two options
        words = [*words[:at], "=".join(words[at:at + 2]), *words[at + 2:]]
    parser, name, takes_command, begin = make_parser(command), command.name, command.name in ("add", "run"), 0
    actions, elsewhere = parser._option_string_actions, dict[str, str]()    # {an option that both have: what to type}
    unknown = dict[str, str]()                      # {an option that is none here: what to type, if that is known}
    while begin < len(words):
        word = words[begin]
        if takes_command and (word[:1] != "-" or word in ("-", "--")):
            break                                   # the command begins
        flag, action = word.partition("=")[0], actions.get(word)        # None: as --gpus=2, or -g2
        hint = translate_word(name, flag, words[begin:])
        if not hint and (takes_command or name in ("edit", "retry")):
            hint = explain_sbatch(words[begin:])
        ours = next((own for own in (flag, flag[:2]) if own in actions), "")
        if not ours and (hint or (takes_command and word[:1] == "-")):
            unknown[flag] = hint
            is_alone = "=" in word or flag in SWITCHES or not hint or (takes_command and len(words) <= begin + 2)
            begin += 1 if is_alone or "".join(words[begin + 1:begin + 2])[:1] == "-" else 2
            continue
        if hint and f"{hint} ".replace("=", " ") not in f"{' '.join(words)} ".replace("=", " "):
            elsewhere[ours] = hint
        begin += 2 if action and action.nargs is None else 1
    if any(unknown.values()):
        refuse_unknown(name, unknown, actions)
    rest = words[begin:]                            # the command, and what stands after it
    try:
        with contextlib.redirect_stdout(out):
            options = parser.parse_args(words)
    except NexusError as error:
        is_of_command = takes_command and "unrecognized" in error.message and bool(rest) and " " not in rest[0]
        if not is_of_command or not any(word[:1] == "-" for word in rest):
            hint = error.hint or f"nexus help {name}"
            hint = next((elsewhere[own] for own in elsewhere if re.search(f"(^|[ /]){own}[ /]", error.message)), hint)
            raise NexusError(error.kind, error.message, hint) from None
    else:
        if not takes_command or len(options.command) < 2 or rest[0] == "--":
            return options
        if not any(word in actions for word in rest):
            return options
    refuse(f"{name}: what stands after {rest[0]} could be meant for it or for nexus", hint=(
        f"nexus {' '.join([name, *map(quote, words[:begin])])} {quote(' '.join(map(quote, rest)))}"))


def refuse_unknown(name: str, unknown: Mapping[str, str], ours: Iterable[str]) -> NoReturn:
    """Raises: usage, which names all options that are none of this command, with what to type for each."""
    flags_of = dict[str, list[str]]()
    for flag, hint in unknown.items():
        flags_of.setdefault(hint or suggest(flag, ours) or f"nexus help {name}", []).append(flag)
    hints = [hint if len(flags_of) == 1 else f"{', '.join(flags)}: {hint}" for hint, flags in flags_of.items()]
    told = " and ".join(filter(None, (", ".join(map(repr, [*unknown][:-1])), repr([*unknown][-1]))))
    refuse(f"{name} does not know {told}", hint="; ".join(hints))


def parse_again(command: Subcommand, words: Sequence[str], at: int, out: TextIO) -> argparse.Namespace:
    """The options of `retry ID -- CMD...`, where the command of one job is typed as it is; `--` stands at `at`.

    Raises: usage.
    """
    options = parse_words(command, words[:at], out)
    if not words[at + 1:] or len(options.ids) != 1:
        refuse(f"{command.name}: after -- comes the command, of one job", f"nexus {command.name} ID -- python train.py")
    if options.command is not None:
        refuse(f"{command.name}: the command is given twice", "leave out --command, or what comes after --")
    options.command = parse_option(CHANGES["command"], ["--"], join_command(words[at + 1:]))
    return options

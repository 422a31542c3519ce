"""A sweep: one submission, and a job for each combination of values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from .job import MAX_JOBS
from .text import INVISIBLE, format_line, refuse
from .value import Value

if TYPE_CHECKING:
    from typing import Any

MAX_SWEEP = 10000                       # jobs of one sweep
MAX_SWEEP_BYTES = 2**20                 # of the values of a name
SPAN_NUMBER = r"[+-]?[0-9]{1,12}(?:\.[0-9]{1,12})?"
PLACEHOLDER = r"(?<!\$)\{([A-Za-z_]\w*)\}"             # `{lr}`, and not the shell's `${lr}`
BRACKETS = {")": "(", "]": "[", "}": "{"}
AWK_WORDS = ("print", "next", "exit", "getline")       # that awk programs have in braces


def parse_sweep(text: str, read_lines: Callable[[str], Iterable[str]]) -> tuple[str, tuple[str, ...]]:
    """(name, values) of `lr=1e-3,1e-4`, `seed=0..4`, `lr=0.1..0.5..0.2`, `s=@values.txt`, `layers=[64,64],[128]`.

    `read_lines`: returns the lines of a file.  Quotes stay in the values.  Raises: usage; what `read_lines` raises.
    """
    name, _, listed = text.partition("=")
    values: list[str] = []
    for part in split_values(listed, f"sweep {name}"):
        if part.startswith("@@"):
            values.append(part[1:])
        elif part.startswith("@"):
            values += [line.strip() for line in read_lines(part[1:]) if line.strip()]
        elif ".." in part and re.fullmatch("[-+0-9.e]+", part) and re.search("[0-9]", part):
            values += expand_span(part, f"sweep {name}")
        else:
            values.append(part)
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not values or not all(values):
        refuse(f"sweep {format_line(text, 60)} is not like NAME=VALUE,VALUE", hint="like lr=1e-3,1e-4 or seed=0..4")
    return name, tuple(values)


def split_values(text: str, what: str) -> list[str]:
    """The parts between commas, except for commas in brackets and quotes.  Raises: usage, when these do not match."""
    parts, start, still_open = list[str](), 0, list[int]()      # still_open: the places of brackets and of a quote
    for at, letter in enumerate(text):
        last = text[still_open[-1]] if still_open else ""
        if last in ("'", '"'):
            if letter == last:
                still_open.pop()
        elif letter in "'\"([{":
            still_open.append(at)
        elif letter in BRACKETS:
            if last != BRACKETS[letter]:
                refuse(f"{what}: nothing opens the {letter} at character {at + 1} of {format_line(text, 60)}",
                       hint=f'in quotes it stands for itself: "{letter}"')
            still_open.pop()
        elif letter == "," and not still_open:
            parts.append(text[start:at])
            start = at + 1
    if still_open:
        at = still_open[-1]
        refuse(f"{what}: nothing closes the {text[at]} at character {at + 1} of {format_line(text, 60)}",
               hint="commas in brackets and quotes do not split values, so these must match")
    return [*parts, text[start:]]


def expand_span(part: str, what: str) -> list[str]:
    """The numbers of `0..4` or `0.1..0.5..0.2`, with both ends, the last if it is met.  Raises: usage."""
    import decimal
    match = re.fullmatch(f"({SPAN_NUMBER})\\.\\.({SPAN_NUMBER})(?:\\.\\.({SPAN_NUMBER}))?", part)
    hint = "ranges are like 0..4, 20..0..-5 or 0.1..0.5..0.2; list other values, like 1e-4,1e-3"
    if not match:
        refuse(f"{what}: {format_line(part, 60)} is no range", hint)
    if not match[3] and "." in match[1] + match[2]:
        refuse(f"{what}: {part} needs a step", f"like {part}..0.1")
    first, last, step = (decimal.Decimal(number or 1) for number in match.groups())
    if (last - first) * step < 0 or not step:
        refuse(f"{what}: {part} never comes to its end", f"like {match[1]}..{match[2]}..{-1 if last < first else 1}")
    count = min(int((last - first) / step), MAX_SWEEP) + 1      # one more than allowed is enough to refuse it
    return [f"{first + number * step:f}" for number in range(count)]


def list_combinations(sweeps: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """{name: value} of each combination of the sweeps' values, the last sweep changing fastest.  Raises: usage."""
    import itertools
    import math
    names = [name for name, _ in sweeps]
    for name in names:
        if names.count(name) > 1:
            refuse(f"sweep {name} is given twice", hint=f"put all values of {name} into one")
    if math.prod(len(values) for _, values in sweeps) > MAX_SWEEP:
        refuse(f"the sweep has more than {MAX_SWEEP} combinations", hint="sweep over fewer values")
    return [dict(zip(names, values)) for values in itertools.product(*(values for _, values in sweeps))]


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """The text with each `{name}` of `values` replaced, in one pass: what stands in a value stays as it is."""
    return re.sub(PLACEHOLDER, lambda match: values.get(match[1], match[0]), text)


def find_placeholders(text: str) -> list[str]:
    """The names in braces, but for words of awk, as in `awk '{print}'`."""
    return [name for name in re.findall(PLACEHOLDER, text) if name not in AWK_WORDS]


def strip_quotes(text: str) -> str:
    """A text as the shell reads it: without its quotes."""
    return re.sub(r"""(['"])(.*?)\1""", r"\2", text)


class Spread(Value):
    """The jobs of a sweep."""
    rows: Sequence[Mapping[str, Any]]           # what tells them apart, as in `each` of POST /queue
    texts: frozenset[str]                       # of the texts that all were to have: those that the rows have
    variables: frozenset[str]                   # and of the variables
    unfilled: tuple[str, ...]                   # `{words}` that no sweep has a value for


MAX_SPREAD_BYTES = 2**26        # of the commands and other texts of one sweep


def spread_sweep(sweeps: Sequence[tuple[str, Sequence[str]]], commands: Sequence[str], texts: Mapping[str, str],
                 env: Mapping[str, str], is_script: bool = False) -> Spread:
    """The jobs of these commands for each combination of the sweeps' values, which replace `{name}`.

    `texts`: the name, group and cwd that were given; `env`: the variables; `is_script`: a command has its values there.
    A job's name tells its values, unless these stand in it.  Raises: usage.
    """
    combinations = list_combinations(sweeps)
    own_env = {name: text for name, text in env.items() if find_placeholders(text)}
    given = {name: text for name, text in texts.items() if find_placeholders(text)}
    shared = {word for text in (*given.values(), *own_env.values()) for word in find_placeholders(text)}
    unfilled = set[str]()
    for command in commands:
        places, names = {*shared, *find_placeholders(command)}, combinations[0]
        unfilled |= places.difference(names)
        unused = [name for name in names if name not in places]
        if unused and not is_script:            # a script has its values in its environment
            refuse(f"sweep {unused[0]}: there is no {{{unused[0]}}} in the command {format_line(command, 100)}",
                   hint=f"put {{{unused[0]}}} where the value belongs, there or in the name, group, cwd or a variable")
    longest = {name: max(len(value) for value in values) for name, values in sweeps}
    length = sum(longest.values()) + sum(
        len(text) + sum(longest.get(word, 0) for word in find_placeholders(text))
        for text in (*commands, *given.values(), *own_env.values()))
    if len(combinations) * length > MAX_SPREAD_BYTES or len(combinations) * len(commands) > MAX_JOBS:
        refuse("the sweep makes too many jobs, or too long commands", "add it in parts")
    in_script = {f"NEXUS_SWEEP_{name}": f"{{{name}}}" for name in combinations[0]} if is_script else {}
    shared_texts = {**({"title": texts["name"]} if "name" in texts else {}), **given,
                    **{f"env.{name}": text for name, text in {**own_env, **in_script}.items()}}
    rows = [spread_row({"command": command, **shared_texts}, values, number if is_script else None)
            for command in commands for number, values in enumerate(combinations)]
    return Spread(rows, frozenset(given), frozenset(own_env), tuple(sorted(unfilled)))


def spread_row(texts: Mapping[str, str], values: Mapping[str, str], number: int | None) -> dict[str, Any]:
    """The row of one combination.  `number`: of the run of a script, which gets it."""
    row = fill_template(texts, values)
    if number is not None:
        row["env"] = {**row.get("env", {}), "NEXUS_TASK_ID": str(number)}
    return {**row, "template": {**texts, **keep_quotes(values)}}


def keep_quotes(values: Mapping[str, str]) -> dict[str, str]:
    """What a template has of these values: those that stand in quotes, as they are known without."""
    return {f"value.{name}": value for name, value in values.items() if strip_quotes(value) != value}


def fill_template(template: Mapping[str, str], values: Mapping[str, str]) -> dict[str, Any]:
    """What a job with these values has of Job.template, as in `each` of POST /queue."""
    plain = {name: strip_quotes(value) for name, value in values.items()}
    row: dict[str, Any] = {"command": fill_placeholders(template["command"], values), "sweep_values": plain}
    row.update((name, fill_placeholders(template[name], plain)) for name in ("name", "group", "cwd")
               if name in template)
    if "name" not in row:
        words = re.sub(INVISIBLE, "", " ".join(f"{name}={value}" for name, value in plain.items()))
        row["name"] = format_line(f"{template['title']} {words}" if "title" in template else words, 60)
    env = {name[4:]: fill_placeholders(text, plain) for name, text in template.items() if name.startswith("env.")}
    return {**row, **({"env": env} if env else {})}

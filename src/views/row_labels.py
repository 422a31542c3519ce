"""What tells the rows of a list apart, where jobs share a sweep or a group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

LONG_COMMON = 8                 # characters that texts must have in common for these to be left out
LONG_TEXT = 20                  # a value that is no longer stands whole
LONG_COMMAND = 40               # a command that is no longer needs no label


def label_rows(rows: Iterable[Json]) -> dict[str, str]:
    """{id: what tells a job from the others of its sweep or group in this list}, like `lr=1e-3 bs=64`.

    Jobs of no group belong together when they run one program with as many words, as a loop of the shell makes them.
    `rows`: jobs in JSON.  Who has nothing to be told from has no label, but for the values that make a name.
    """
    return {row["id"]: label for family in find_families(rows)
            for row, label in zip(family, label_family(family)) if label}


def find_families(rows: Iterable[Json]) -> list[list[Json]]:
    """The rows of each sweep or group, of each that is no other user's."""
    families: dict[tuple[Any, ...], dict[str, Json]] = {}
    for row in rows:
        if row["command"] is None:              # another user's
            continue
        kind: Iterable[Any] = sorted(row.get("sweep_values") or ())
        if not (kind or row["group"]):
            words = row["command"].split()
            kind = (words[:2], len(words))
        families.setdefault((row["user"], row["group"], str(kind)), {})[row["id"]] = row
    return [[*family.values()] for family in families.values()]


def list_common_values(rows: Iterable[Json]) -> list[str]:
    """`the jobs of exp1 all have lr=0.1 bs=64`, of each sweep: the values that no label tells."""
    lines = list[str]()
    for family in find_families(rows):
        values = [row.get("sweep_values") or {} for row in family]
        same = [f"{name}={text}" for name, text in values[0].items() if all(each[name] == text for each in values)]
        if same and len(family) > 1:
            lines.append(f"the jobs of {family[0]['group'] or 'one sweep'} all have {' '.join(same)}")
    return lines


def label_family(family: Sequence[Json]) -> list[str]:
    """The values that differ; where they do not tell jobs apart, names that do, or the words of the commands."""
    values = [row.get("sweep_values") or {} for row in family]
    commands, names = [row["command"] for row in family], [row["name"] or "" for row in family]
    if len(family) == 1:
        return names if names[0] == " ".join(f"{name}={text}" for name, text in values[0].items()) else [""]
    parts: list[list[str]] = [[] for _ in family]
    for name in values[0]:
        texts = [each[name] for each in values]
        if len({*texts}) > 1:
            parts = [[*part, f"{name}={text}"] for part, text in zip(parts, drop_common(texts, LONG_TEXT))]
    if len({*map(tuple, parts)}) < len({*commands}):
        is_named = all(names) and len({*names}) == len({*commands}) and not any(parts)
        words = drop_common(names) if is_named else drop_common_words(commands, not (family[0]["group"] or values[0]))
        parts = [[*part, word] for part, word in zip(parts, words)]
    return [" ".join(filter(None, part)) for part in parts]


def drop_common(texts: Sequence[str], length: int = 0) -> list[str]:
    """Texts of which one is longer without what all begin with, if that is long: whole words."""
    least, most = min(texts), max(texts)
    same = next((at for at, letters in enumerate(zip(least, most)) if len({*letters}) > 1), len(least))
    common = re.sub(r"[^\s=/,:]*$", "", least[:same])
    is_long = len(common) >= LONG_COMMON and max(map(len, texts)) > length
    return [text[len(common):] or text for text in texts] if is_long else [*texts]


def drop_common_words(texts: Sequence[str], has_program: bool) -> list[str]:
    """Long commands without the words that all have at one place; an option stays before its value.

    `has_program`: with what they run, by its name.
    """
    if max(map(len, texts)) <= LONG_COMMAND:
        return [""] * len(texts)
    rows = [text.split() for text in texts]
    least = min(map(len, rows))
    first = next((at for at in range(least) if len({row[at] for row in rows}) > 1), least)
    last = next((at for at in range(least - first) if len({row[-1 - at] for row in rows}) > 1), least - first)
    is_even = len({*map(len, rows)}) == 1
    differ = {at for at in range(first, least - last) if len({row[at] for row in rows}) > 1}
    if is_even:
        for at in differ:
            for row, word in zip(rows, drop_common([row[at] for row in rows], LONG_TEXT)):
                row[at] = word
    made = []
    for row in rows:
        kept = differ if is_even else {*range(first, len(row) - last)}
        kept = kept | {at - 1 for at in kept if at and re.fullmatch("--?[a-zA-Z][^=]*", row[at - 1])}
        program = [row[1].rpartition("/")[2]] if has_program and 1 not in kept else []
        made.append(" ".join([*program, *(row[at] for at in sorted(kept))]) if kept else "")
    return made

"""What tells the rows of a list apart, where jobs share a sweep or a group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

LONG_COMMON = 8                 # characters that texts must have in common for these to be left out
LONG_TEXT = 24                  # a value that is no longer stands whole


def label_rows(rows: Iterable[Json]) -> dict[str, str]:
    """{id: what tells a job from the others of its sweep or group in this list}, like `lr=1e-3 bs=64`.

    `rows`: jobs in JSON.  A job that has no such other has no label.
    """
    families: dict[tuple[Any, ...], dict[str, Json]] = {}
    for row in rows:
        values = row.get("sweep_values") or {}
        if row["command"] is not None and (row["group"] or values):         # None: another user's
            families.setdefault((row["user"], row["group"], *sorted(values)), {})[row["id"]] = row
    return {job_id: label for family in families.values() if len(family) > 1
            for job_id, label in zip(family, label_family([*family.values()])) if label}


def label_family(family: Sequence[Json]) -> list[str]:
    """The values that differ; where they do not tell jobs apart, names that do, or the words of the commands."""
    values = [row.get("sweep_values") or {} for row in family]
    commands = [row["command"] for row in family]
    parts: list[list[str]] = [[] for _ in family]
    for name in values[0]:
        texts = [each[name] for each in values]
        if len({*texts}) > 1:
            texts = drop_common(texts) if max(map(len, texts)) > LONG_TEXT else texts
            parts = [[*part, f"{name}={text}"] for part, text in zip(parts, texts)]
    if len({*map(tuple, parts)}) < len({*commands}):
        names = [row["name"] or "" for row in family]
        is_named = all(names) and len({*names}) == len({*commands}) and not any(parts)
        words = drop_common(names) if is_named else drop_common_words(commands)
        parts = [[*part, word] for part, word in zip(parts, words)]
    return [" ".join(filter(None, part)) for part in parts]


def drop_common(texts: Sequence[str]) -> list[str]:
    """The texts without what they begin with in common, if that is long: whole words."""
    least, most = min(texts), max(texts)
    same = next((at for at, letters in enumerate(zip(least, most)) if len({*letters}) > 1), len(least))
    common = re.sub(r"[^\s=/_.,:-]*$", "", least[:same])
    return [text[len(common):] or text for text in texts] if len(common) >= LONG_COMMON else [*texts]


def drop_common_words(texts: Sequence[str]) -> list[str]:
    """The texts without the words that all have at one place; an option stays before its value."""
    rows = [text.split() for text in texts]
    least = min(map(len, rows))
    first = next((at for at in range(least) if len({row[at] for row in rows}) > 1), least)
    last = next((at for at in range(least - first) if len({row[-1 - at] for row in rows}) > 1), least - first)
    differ = [at for at in range(first, least - last) if len({row[at] for row in rows}) > 1]
    is_even = len({*map(len, rows)}) == 1
    made = []
    for row in rows:
        kept = {*differ} if is_even else {*range(first, len(row) - last)}
        kept |= {at - 1 for at in kept if at and re.fullmatch("--?[a-zA-Z][^=]*", row[at - 1])}
        made.append(" ".join(row[at] for at in sorted(kept)))
    return made

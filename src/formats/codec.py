"""Values as JSON, for the disk and for nodes.

A value becomes a JSON object of the fields that differ from their defaults; bytes become base64.  The annotations
of its class say how it is decoded; a fact of another type, or out of the range of its kind, is refused.  Strict
decoding is for nodes: an unknown key is refused, too, and a list that does not end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from ..values.job import FACT_KINDS
from ..values.schema import describe_schema, fits_alone, keep
from ..values.text import cut_words
from ..values.value import Value

if TYPE_CHECKING:
    from typing import Any

    from ..opening import AnyValue


def encode_value(item: Any) -> dict[str, Any]:
    """{field: fact} of the fields that differ from their defaults, and of those that are always written."""
    cls = type(item)
    facts = {name: fact for name, fact in vars(item).items() if fact != getattr(cls, name, ...)}
    return {**facts, **{name: getattr(item, name) for name in cls.WRITTEN}}


def encode_inner(fact: Any) -> Any:
    """Encode a fact that JSON has no form for.  Raises: TypeError."""
    if isinstance(fact, bytes):
        import base64
        return base64.b64encode(fact).decode("ascii")
    if isinstance(fact, Value):
        return encode_value(fact)
    raise TypeError(f"a {type(fact).__name__} cannot be kept")


encode_json = json.JSONEncoder(separators=(",", ":"), default=encode_inner).encode
JSON_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "bytes": (str,), "list": (list,),
    "tuple": (list, tuple), "dict": (dict,)}
MAX_ITEMS = 10000                           # of a list in strict decoding


def decode(kind: str, given: Any, name: str = "it", is_hidden: bool = False, is_strict: bool = False) -> Any:
    """Decode a fact.  `kind` is written as annotations are: `tuple[int, ...] | None`.

    Raises: TypeError, ValueError.  `is_hidden`: they do not show it.
    """
    is_optional = kind.endswith(" | None")
    if kind == "Any" or (is_optional and given is None):
        return given
    outer, _, inner = (kind[:-len(" | None")] if is_optional else kind).partition("[")
    inner = inner[:-1]
    if outer in FACT_KINDS:
        row = FACT_KINDS[outer]
        if not fits_alone(row.schema, given):
            raise TypeError(f"{name} is {describe_fact(given, is_hidden)}, and not {describe_schema(row.schema)}")
        return keep(row, given, name)
    fits = type(given) in JSON_KINDS.get(outer, (dict,))
    if fits and outer in ("int", "float"):
        fits = abs(given) <= 2**64              # NaN is not
    if fits and is_strict and isinstance(given, (list, dict)):
        fits = len(given) <= MAX_ITEMS
    if fits and outer == "tuple":
        kinds = [inner[:-len(", ...")]] * len(given) if inner.endswith(", ...") else inner.split(", ")
        fits = len(kinds) == len(given)
    if not fits:
        raise TypeError(f"{name} is {describe_fact(given, is_hidden or outer == 'Mapping')}, and not {kind}")
    if outer == "tuple":
        return tuple(decode(kind, item, name, is_hidden, is_strict) for kind, item in zip(kinds, given))
    if outer == "Mapping":                      # its keys are texts, as all keys of JSON
        return {key: decode(inner.partition(", ")[2], item, name, True, is_strict)      # variables
                for key, item in given.items()}
    if outer == "bytes":
        import base64
        return base64.b64decode(given, validate=True)
    return given if outer in JSON_KINDS else decode_value(globals()[outer], given, name, is_strict)


def describe_fact(given: Any, is_hidden: bool) -> str:
    return type(given).__name__ if is_hidden or isinstance(given, (list, dict)) else cut_words(repr(given), 60)


def decode_value(cls: type[AnyValue], fields: Any, name: str = "it", is_strict: bool = False) -> AnyValue:
    """Fields that the class does not have are ignored, unless `is_strict`.  Raises: TypeError, ValueError."""
    kinds, facts = cls.KINDS, decode("dict", fields, name)
    unknown = facts.keys() - kinds.keys() if is_strict else ()
    if unknown:
        raise TypeError(f"{cut_words(min(unknown), 60)} is no key of {name}")
    return cls(**{key: decode(kinds[key], fact, key, is_strict=is_strict)
                  for key, fact in facts.items() if key in kinds})

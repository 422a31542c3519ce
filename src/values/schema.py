"""check(schema, value, name): what JSON may hold, and the words for what is wrong with it.

A schema is a dict in the small part of JSON Schema that nexus uses; openapi.json shows the same dicts.  A value
class whose fields are made by field() or optional() is a table: each row has a schema, a help text and marks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence

from ..opening import TYPE_CHECKING
from .errors import NexusError
from .text import CONTROL, ID_PATTERN, INVISIBLE, SLICE_PLACE, SURROGATES, cut_middle, format_line, guess_number, refuse, suggest
from .value import Field

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Schema

JSON_TYPES: Mapping[type, Sequence[str]] = {
    str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
    list: ("array",), tuple: ("array",), dict: ("object",)}
NO_NUL = f"[^\\x00{SURROGATES}]"
NOTHING = {"type": "null"}
MAX_FAULTS = 20                 # of one object; then it is not checked further: a submission may have millions


def integer_in(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "title": f"a whole number from {least} to {most}"}


def number_in(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most, "title": f"a number from {least} to {most}"}


def one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words), "title": f"one of {', '.join(words)}"}


def matching(pattern: str, title: str, **more: Any) -> Schema:
    """A text that matches; `title` says in words what it must be."""
    return {"type": "string", "pattern": pattern, "title": title, **more}


def list_of(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    limits = {**({"minItems": least} if least else {}), **({} if most is None else {"maxItems": most})}
    words = (f" of at least {least}" if least else "") + ("" if most is None else f" of at most {most}")
    return {"type": "array", "items": items, **limits, "title": "a list" + words}


def or_null(schema: Schema) -> Schema:
    options = schema.get("anyOf", [schema])
    return schema if NOTHING in options else {"anyOf": [*options, NOTHING]}


def object_of(rows: Mapping[str, Field], title: str, nulls: Container[str] = (), **more: Any) -> Schema:
    """An object with these rows as keys.  `nulls`: the keys that may be null, which stands for what was not given."""
    required = more.get("required", [name for name, row in rows.items() if row.default is ...])
    properties = {}
    for name, row in rows.items():
        schema = {"anyOf": [row.schema, row.text]} if row.text else row.schema
        schema = or_null(schema) if name in nulls else schema
        properties[name] = {**schema, "description": row.help}
    return {"type": "object", "title": title, "required": required, "additionalProperties": False,
            "properties": properties, **more}


STRING, INTEGER, FLOAT = {"type": "string"}, {"type": "integer"}, {"type": "number"}       # of replies
MAX_NAME = 200                  # characters of an id, a name or a pattern of names; LINE has the same limit
NAMED: Schema = {**STRING, "maxLength": MAX_NAME}
TIME = {"type": "string", "format": "date-time"}
FLAG: Schema = {"type": "boolean"}
TEXT = matching(f"^{NO_NUL}*$", "a text without NUL")
TEXTS = list_of(TEXT)
PAIR = matching("^[^=]+=", "NAME=VALUE", writeOnly=True)        # of an option that makes an object
JOB_ID = matching(f"^{ID_PATTERN}$", "3 or 4 letters of the base58 alphabet (no digits, no I, O, l)", examples=["abc"])
LINE = matching(
    "^[^C]*[^\\sC][^C]*$".replace("C", CONTROL[1:-1] + INVISIBLE[1:-1]), "one line of at most 200 bytes",
    **{"x-max-bytes": 200})
PATH = matching(f"^/{NO_NUL}*$", "an absolute path", **{"x-max-bytes": 4095})
SECONDS = number_in(0, 31536000)


def check(schema: Schema, given: Any, name: str) -> Any:
    """The checked value: lists become tuples, and 2.0 becomes 2 as a whole number.

    Raises: usage, with the faults of all keys of an object.
    """
    if "anyOf" in schema:
        return check_any(schema, given, name)
    if isinstance(given, float) and schema.get("type") == "integer" and given.is_integer():
        given = int(given)
    if not fits_alone(schema, given):
        raise describe_fault(schema, given, name)
    if isinstance(given, dict):
        return check_object(schema, given, name)
    if isinstance(given, (list, tuple)):
        items = schema.get("items", {})
        return tuple([check(items, item, f"{name}[{number}]") for number, item in enumerate(given)])
    return given


def read_object(rows: Mapping[str, Field], schema: Schema, given: Any) -> dict[str, Any]:
    """{key: checked value} of an object with these rows.  Raises: usage, with all faults."""
    kept = check(schema, given, "")
    return {key: None if fact is None else keep(rows[key], fact, key) for key, fact in kept.items() if key in rows}


def keep(row: Field, fact: Any, name: str) -> Any:
    """The value of checked JSON.  Raises: usage."""
    if row.text and isinstance(fact, str) and row.parse:
        fact = check(row.schema, row.parse(fact), name)
    return row.convert(fact) if row.convert else fact


def parse_field(row: Field, text: str, name: str) -> Any:
    """The value of a text from the command line or a file.  Raises: usage."""
    has_number = not row.text and row.schema.get("type") in ("integer", "number")
    return keep(row, check(row.text or row.schema, guess_number(text) if has_number else text, name), name)


def parse_repeated(row: Field, text: str, name: str) -> list[Any]:
    """What a text adds to the JSON of a row with `repeats`: values of its list, or a (key, value) of its object.

    Raises: usage.
    """
    if row.takes_pairs:
        key, _, value = check(PAIR, text, name).partition("=")
        return [*check(row.schema, {key: value}, name).items()]
    given = check(row.text, text, name) if row.text else text
    return [*check(row.schema, row.parse(given) if row.parse else [given], name)]


def fits_alone(schema: Schema, given: Any) -> bool:
    """Whether a value fits, without the values in it."""
    types = JSON_TYPES.get(type(given), ())
    if schema.get("type", "") not in ("", *types) or given not in schema.get("enum", [given]):
        return False
    if isinstance(given, str):                  # its length first: searching a long text takes long
        most = schema.get("x-max-bytes", 4 * len(given))
        return (len(given) <= min(most, schema.get("maxLength", len(given)))
                and (4 * len(given) <= most or len(given.encode("utf-8", "surrogatepass")) <= most)
                and ("pattern" not in schema or make_search(schema["pattern"])(given) is not None))
    if isinstance(given, (list, tuple)):
        return bool(schema.get("minItems", 0) <= len(given) <= schema.get("maxItems", len(given)))
    if isinstance(given, dict):
        return bool(len(given) <= schema.get("maxProperties", len(given)))
    if "number" in types:                       # NaN fails both comparisons
        fits = schema.get("minimum", given) <= given <= schema.get("maximum", given)
        return bool(fits and ("x-decimals" not in schema or abs(given - round(given, schema["x-decimals"])) < 1e-8))
    return True


@functools.lru_cache(None)
def make_search(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """What searches a text for a pattern of JSON Schema: Python's $ also matches before a last newline."""
    return re.compile(re.sub(r"\$$", r"\\Z", pattern)).search


def check_object(schema: Schema, given: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    what = schema.get("title") or name
    rows, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    faults = [NexusError("usage", f"{key} is missing" + (f" in {name}" if name else ""))
              for key in schema.get("required", ()) if key not in given]
    if len(given) < schema.get("minProperties", 0):
        faults.append(NexusError("usage", f"{what} needs one of {', '.join(rows)}"))
    checked = {}
    for key, fact in given.items():
        try:
            if key not in rows and others is False:
                refuse(f"'{format_line(key, 40)}' is not a key of {what}",
                       suggest(key, rows) or f"the keys are {', '.join(rows)}")
            if "propertyNames" in schema:
                check(schema["propertyNames"], key, f"a key of {what}")
            checked[key] = check(rows.get(key, others), fact, f"{name}.{key}" if name else key)
        except NexusError as error:
            faults.append(error)
        if len(faults) >= MAX_FAULTS:
            break
    if faults:
        hints = dict.fromkeys(fault.hint for fault in faults if fault.hint)
        raise NexusError("usage", "; ".join(fault.message for fault in faults), "; ".join(hints))
    return checked


def check_any(schema: Schema, given: Any, name: str) -> Any:
    """The first schema that fits.  If none does: what is wrong by the only one beside null, or what all of them are."""
    options = [option for option in schema["anyOf"] if option != NOTHING or given is None]
    if len(options) == 1:
        return check(options[0], given, name)
    for option in options:
        with contextlib.suppress(NexusError):
            return check(option, given, name)
    raise describe_fault(schema, given, name)


def describe_fault(schema: Schema, given: Any, name: str) -> NexusError:
    options = schema.get("anyOf", [schema])
    words = [word for option in options for word in option.get("enum", ())]
    examples = [json.dumps(example) for option in options for example in option.get("examples", ())]
    hint = suggest(given, words) if isinstance(given, str) else ""
    if not hint and examples:
        hint = f"like {' or '.join(examples)}"
    part = cut_middle(given, 100) if isinstance(given, str) else given
    if isinstance(part, str) and (letter := re.search(INVISIBLE, part)):
        hint = f"leave out U+{ord(letter[0]):04X}, which is in it: nobody sees it"
    part = part[:60] if isinstance(part, (list, tuple)) else part
    shown = "" if is_secret(schema) else f", not {format_line(json.dumps(part, default=str), 60)}"
    return NexusError("usage", f"{name or schema.get('title')} must be {describe_schema(schema)}{shown}", hint)


def is_secret(schema: Schema) -> bool:
    """Whether a value, or one in it, is only taken in, and shown nowhere: `writeOnly`."""
    inner = (*schema.get("anyOf", ()), *schema.get("properties", {}).values(), schema.get("items", {}))
    return "writeOnly" in schema or any(map(is_secret, filter(None, inner)))


KIND_WORDS = {"string": "a text", "boolean": "true or false", "array": "a list", "object": "an object", "null": "null"}


def describe_schema(schema: Schema) -> str:
    """What a value must be, in words: `a whole number from 1 to 65535`."""
    if "anyOf" in schema:
        return " or ".join(map(describe_schema, schema["anyOf"]))
    kind = schema.get("type", "")
    words = schema["title"] if "title" in schema and kind != "object" else KIND_WORDS.get(kind, "something else")
    words += f" of at most {schema['maxProperties']} keys" if "maxProperties" in schema else ""
    words += f", at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return words + (f", each {describe_schema(schema['items'])}" if "items" in schema else "")


# config.toml.  Its sections are tables; the rows make the parser, checks, defaults, `nexus config` and the sample file.

NODE_WORD = "[A-Za-z0-9_]"
GPU_PLACE = rf"([\w.-]{{1,63}}:)?([0-9]{{1,4}}|{SLICE_PLACE})"
NODE_NAME = matching(
    f"^{NODE_WORD}[A-Za-z0-9_.-]{{0,62}}$", "a name of letters, digits, `_`, `.` and `-`", examples=["n1"])
SSH_WORD = f"{NODE_WORD}[^\\s{CONTROL[1:-1]}]{{0,252}}"      # no option

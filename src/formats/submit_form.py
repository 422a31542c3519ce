"""POST /api/submit: a multipart form with a script and flat YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import AMOUNT, DURATION
from ..values.schema import LINE, STRING, matching, parse_field
from ..values.submission import JOB_FIELDS
from ..values.text import format_line, parse_duration, refuse, suggest
from ..values.value import Field

if TYPE_CHECKING:
    from typing import Any

FORM_FIELDS = {"code": 5 * 2**20, "config_file": 64 * 2**10}        # {name: bytes at most}
FORM_HINT = 'curl -X POST http://HOST:PORT/api/submit -F "code=@my_script.py" -F "config_file=@config.yaml"'
FORM_KEYS: Mapping[str, Field] = {                               # the keys of config_file
    **{name: Field(LINE, help) for name, help in (
        ("competition_id", "what its submitter calls it by"), ("project_id", "and by"), ("user_id", "whose it is"))},
    "expected_time": Field(JOB_FIELDS["expected_time"].schema, parse=parse_duration,
                           text=matching(
                               f"^({DURATION}|{AMOUNT})$", "seconds, or a time like 90s, 30m, 2h", maxLength=100)),
    **{name: JOB_FIELDS[name] for name in ("gpus", "name", "priority")},
    "token": Field({**STRING, "maxLength": 1000, "writeOnly": True}, "who submits it")}


def parse_submit_form(body: bytes, content_type: str) -> tuple[bytes, dict[str, Any]]:
    """(the script, the fields of config_file) of a multipart/form-data body.  Source: RFC 2046 (5.1), RFC 7578.

    Not by the email package: it takes seconds for 5 MiB of short lines.
    Raises: usage, too_large, unsupported_media_type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise NexusError("unsupported_media_type",
                         f"the body must be multipart/form-data, not {format_line(kind, 60) or 'nothing'}", FORM_HINT)
    boundary = re.search(r'(?i);\s*boundary=(?:"([^"]{1,70})"|([^";\s]{1,70}))', content_type)
    mark = f"\r\n--{boundary[1] or boundary[2]}" if boundary else "\r\n--"
    first, *parts = (b"\r\n" + body).split(mark.encode(), len(FORM_FIELDS) + 1)
    fields: dict[str, bytes] = {}
    for part in parts[:-1]:
        headers, _, content = part.partition(b"\r\n\r\n")
        named = re.search(rb'(?im)^content-disposition:\s*form-data;\s*name="?([^";\s]+)', headers)
        fields[named[1].decode("utf-8", "replace") if named else ""] = content
    if first or not parts or parts[-1].strip() != b"--" or fields.keys() != FORM_FIELDS.keys():
        refuse("the form must have the fields code and config_file, and no others, and begin and end with the boundary "
               "that its Content-Type names", FORM_HINT)
    for name, most in FORM_FIELDS.items():
        if not fields[name].strip():
            refuse(f"{name} is empty", FORM_HINT)
        if len(fields[name]) > most:
            raise NexusError("too_large", f"{name} has {len(fields[name])} bytes; at most {most} are taken")
    return fields["code"], parse_submit_config(fields["config_file"].decode("utf-8-sig", "replace"))


def parse_submit_config(text: str) -> dict[str, Any]:
    """{key: value} of config_file, which has YAML's lines `key: value`.  Raises: usage."""
    config: dict[str, Any] = {}
    for line in map(str.strip, text.split("\n")):
        if not line or line == "---" or line.startswith("#"):
            continue
        key, _, rest = line.partition(":")
        key, rest = key.rstrip(), rest.strip()
        if key not in FORM_KEYS:
            refuse(f"config_file: '{format_line(key, 40)}' is no key of it",
                   suggest(key, FORM_KEYS) or f"lines like expected_time: 10; the keys are {', '.join(FORM_KEYS)}")
        quoted = re.fullmatch(r"""(["'])(.*)\1\s*(?:#.*)?""", rest)
        item = quoted[2] if quoted else re.split(r"(?:^|\s)#", rest, maxsplit=1)[0].rstrip()
        if item or quoted:
            config[key] = parse_field(FORM_KEYS[key], item, f"config_file: {key}")
    return config

"""What a request may send has an end."""

import json

import nexus
from nexus import TEXT, object_of

try:
    from re import _parser as parser  # from 3.11 on
except ImportError:
    import sre_parse as parser


def list_unbounded(schema, where, components):
    """Where a text or a list of a request's schema has no length, or a number or an object no bounds."""
    if "$ref" in schema:
        return list_unbounded(components[schema["$ref"].rpartition("/")[2]], where, components)
    if "anyOf" in schema:
        return [found for option in schema["anyOf"] for found in list_unbounded(option, where, components)]
    inner = [(f"{where}.{name}", each) for name, each in schema.get("properties", {}).items()]
    inner += [(f"{where}[]", schema[key]) for key in ("items", "propertyNames", "additionalProperties") if schema.get(key)]
    has_end = "enum" in schema or {
        "string": {"maxLength", "x-max-bytes"} & schema.keys() or has_longest(schema.get("pattern", "")), "array": "maxItems" in schema,
        "object": schema.get("additionalProperties") is False or "maxProperties" in schema,
        "integer": {"minimum", "maximum"} <= schema.keys(), "number": {"minimum", "maximum"} <= schema.keys()}.get(schema["type"], True)
    return [*([] if has_end else [where]), *(found for name, each in inner for found in list_unbounded(each, name, components))]


def has_longest(pattern):
    """Whether what matches a pattern can be so long only."""
    return pattern.startswith("^") and pattern.endswith("$") and parser.parse(pattern).getwidth()[1] < 2000


def test_all_that_a_request_may_send_has_a_length():
    document = json.loads(json.dumps(nexus.make_openapi(nexus.ROUTES, "1")))
    components, found, count = document["components"]["schemas"], [], 0
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            sent = [(row["name"], row["schema"]) for row in call["parameters"]]
            sent += [("body", each["schema"]) for each in call.get("requestBody", {"content": {}})["content"].values()]
            count += len(sent)
            found += [f"{method} {path}: {at}" for name, schema in sent for at in list_unbounded(schema, name, components)]
    assert not found and count > 70
    assert list_unbounded({"type": "array", "items": TEXT}, "x", {}) == ["x", "x[]"]
    filled = object_of(nexus.FORM_KEYS, "a form")
    assert not list_unbounded(filled, "form", {})

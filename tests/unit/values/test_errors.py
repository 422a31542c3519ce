"""What a fault means outside."""

import pytest

import nexus

KINDS = [  # kind, exit code, HTTP status, who meets it
    ("internal", 1, 500, "a bug of ours"),
    ("usage", 2, 400, "a malformed request or command line"),
    ("not_found", 3, 404, "an unknown id"),
    ("conflict", 4, 409, "killing a finished job"),
    ("unauthorized", 5, 401, "no or a bad token"),
    ("forbidden", 5, 403, "somebody else's job"),
    ("unavailable", 6, 503, "the service is not there"),
    ("queue_full", 6, 429, "more than queue_limit"),
    ("method_not_allowed", 2, 405, "PUT /queue"),
    ("length_required", 2, 411, "a body of unknown length"),
    ("too_large", 2, 413, "a body over the limit"),
    ("unsupported_media_type", 2, 415, "a body that is no JSON"),
]


@pytest.mark.parametrize("kind, exit_code, http_status, reason", KINDS, ids=[case[0] for case in KINDS])
def test_kind_decides_exit_code_and_http_status(kind, exit_code, http_status, reason):
    error = nexus.NexusError(kind, "what was tried", hint="what to type")
    assert (error.exit_code, error.http_status) == (exit_code, http_status), reason
    assert (error.kind, error.message, error.hint, str(error)) == (kind, "what was tried", "what to type",
                                                                   "what was tried")
    assert error.to_json() == {"error": kind, "message": "what was tried", "hint": "what to type"}
    assert nexus.decode_error(error.to_json()).to_json() == error.to_json()


OF_OTHERS = [  # reason, JSON of a reply that is no nexus's, the message
    ("a proxy's text", "Bad Gateway", "HTTP 502"), ("a list", [1], "HTTP 502"), ("nothing", None, "HTTP 502"),
    ("no kind", {"message": "x"}, "x"), ("a kind of a later nexus", {"error": "tired", "message": "x"}, "x"),
    ("no kind at all", {"error": ["usage"]}, "HTTP 502")]


@pytest.mark.parametrize("reason, told, message", OF_OTHERS, ids=[case[0] for case in OF_OTHERS])
def test_whatever_is_answered_is_an_error(reason, told, message):
    assert nexus.decode_error(told, "HTTP 502").to_json() == {"error": "internal", "message": message, "hint": ""}


def test_every_kind_is_in_this_table():
    assert {case[0] for case in KINDS} == set(nexus.KINDS)


def test_statuses_of_http_are_told_apart():
    statuses = [http for _, http, _ in nexus.KINDS.values()]
    assert len(statuses) == len(set(statuses)), "a client makes the kind out of the status when a proxy eats the body"

"""Tokens and their file."""

import os
import subprocess
import sys
import textwrap

import pytest
from makers import NOW

import nexus

DAY = 86400.0
TOKENS = {token.sha256: token for token in (
    nexus.Token("ann", nexus.hash_text("secret-of-ann"), NOW - DAY), nexus.Token("bob", nexus.hash_text("secret-of-bob"), NOW, NOW + DAY),
    nexus.Token("bob", nexus.hash_text("second-of-bob"), NOW), nexus.Token("cyd", nexus.hash_text("past-of-cyd1"), NOW, NOW))}


def holders(tokens, now=NOW):
    """{token: user} of those that are good."""
    known = {text: tokens.get(nexus.hash_text(text)) for text in (
        "secret-of-ann", "secret-of-bob", "second-of-bob", "past-of-cyd1", "secret-of-an", "", "\udcff")}
    return {text: token.user for text, token in known.items() if token and token.is_good(now)}


def test_tokens_are_written_and_read(tmp_path):
    nexus.change_tokens(nexus.DISK, str(tmp_path / "tokens.json"), lambda none: TOKENS)
    text = (tmp_path / "tokens.json").read_text()
    assert nexus.read_tokens(nexus.DISK, str(tmp_path / "tokens.json")) == TOKENS and "secret" not in text and "second" not in text
    assert holders(TOKENS) == {"secret-of-ann": "ann", "secret-of-bob": "bob", "second-of-bob": "bob"}
    assert holders(TOKENS, NOW + DAY) == {"secret-of-ann": "ann", "second-of-bob": "bob"}


@pytest.mark.parametrize("user, text, kind, words", [
    ("bob", "short", "usage", "12 to 256"), ("bob", "x" * 257, "usage", "12 to 256"),
    ("bob", "with a blank in", "usage", "without blanks"), ("bob", "with-\u00fcmlaut-in", "usage", "ASCII"),
    ("", "long-enough-one", "usage", "user's name"), ("-x", "long-enough-one", "usage", "user's name"),
    ("a b", "long-enough-one", "usage", "user's name"), ("x" * 65, "long-enough-one", "usage", "user's name"),
    ("dan", "secret-of-ann", "conflict", "ann's already")])
def test_tokens_that_cannot_be(user, text, kind, words):
    with pytest.raises(nexus.NexusError, match=words) as raised:
        nexus.add_token(TOKENS, user, text, None, NOW)
    assert raised.value.kind == kind


@pytest.mark.parametrize("given, gone", [
    ("bob", {"secret-of-bob", "second-of-bob"}), ("secret-of-ann", {"secret-of-ann"}), ("cyd", set()),
    (nexus.hash_text("secret-of-bob")[:12], {"secret-of-bob"})])
def test_revoke(given, gone):
    left = nexus.revoke_tokens(TOKENS, given)
    assert holders(TOKENS).keys() - holders(left).keys() == gone and len(left) < len(TOKENS)


@pytest.mark.parametrize("given", ["nobody", "", "secret-of", nexus.hash_text("secret-of-bob")[:8]])
def test_revoke_of_none(given):
    with pytest.raises(nexus.NexusError, match="no token") as raised:
        nexus.revoke_tokens(TOKENS, given)
    assert raised.value.kind == "not_found"


TOP = os.path.dirname(os.path.abspath(nexus.__file__))
DISK = nexus.Disk()


def test_tokens_made_at_once_are_all_kept(tmp_path):
    code = """
        for number in range(10):
            nexus.change_tokens(nexus.DISK, sys.argv[1], lambda tokens: nexus.add_token(
                tokens, f"user{sys.argv[2]}", f"token-{sys.argv[2]}-{number:06}", None, 1000.0))
    """
    code, path = "import sys\nimport nexus\n" + textwrap.dedent(code), str(tmp_path / "tokens.json")
    children = [subprocess.Popen([sys.executable, "-c", code, path, str(number)], cwd=TOP) for number in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert len(nexus.read_tokens(DISK, path)) == 40 and os.stat(path).st_mode & 0o777 == 0o600
    nexus.change_tokens(DISK, path, lambda tokens: nexus.revoke_tokens(tokens, "user1"))
    assert {token.user for token in nexus.read_tokens(DISK, path).values()} == {"user0", "user2", "user3"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tokens": [{"user": "bob"}]}', '{"tokens": 5}'])
def test_tokens_that_are_garbage_let_nobody_in(tmp_path, text):
    path = str(tmp_path / "tokens.json")
    (tmp_path / "tokens.json").write_text(text)
    for act in (lambda: nexus.read_tokens(DISK, path), lambda: nexus.change_tokens(DISK, path, lambda tokens: tokens)):
        with pytest.raises(nexus.NexusError, match="not as nexus writes it") as raised:
            act()
        assert raised.value.kind == "unavailable"
    assert (tmp_path / "tokens.json").read_text() == text

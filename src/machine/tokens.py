"""tokens.json: the tokens of users."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping

from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.state import Token
from ..values.text import format_line, format_time, hash_text, load_json, parse_time, refuse, suggest
from .disk import Disk, disk_errors, make_folder, open_file, read_text, write_atomic

if TYPE_CHECKING:
    from typing import Any


def token_json(token: Token) -> dict[str, Any]:
    return {"user": token.user, "sha256": token.sha256, "created_at": format_time(token.created_at),
            "expires_at": format_time(token.expires_at)}


def add_token(tokens: Mapping[str, Token], user: str, text: str,
              expires_at: float | None, now: float) -> dict[str, Token]:
    """Raises: usage; conflict, when somebody has this token."""
    hint = "leave it out, and one is made up"
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@+-]{0,63}", user, re.ASCII):
        refuse(f"'{format_line(user, 80)}' cannot be a user's name",
               "up to 64 letters, digits and _ . @ + -, like bob or bob@lab.org")
    if not re.fullmatch("[!-~]{12,256}", text):
        refuse("a token must have 12 to 256 visible ASCII characters, without blanks", hint)
    digest = hash_text(text)
    if digest in tokens and tokens[digest].is_good(now):
        raise NexusError("conflict", f"this token is {tokens[digest].user}'s already", hint)
    return {**tokens, digest: Token(user, digest, now, expires_at)}


def revoke_tokens(tokens: Mapping[str, Token], given: str) -> dict[str, Token]:
    """Remove a user's tokens, or one token, named by its text or the beginning of its hash.  Raises: not_found."""
    digests = (hash_text(given), given if re.fullmatch("[0-9a-f]{12,64}", given) else "none")
    kept = {digest: token for digest, token in tokens.items()
            if given != token.user and not digest.startswith(digests)}
    if len(kept) == len(tokens):
        users = {token.user for token in tokens.values()}
        raise NexusError("not_found", "this is no token, and no user with one",
                         hint=suggest(given, users) or "nexus token list")
    return kept


def read_tokens(disk: Disk, path: str) -> dict[str, Token]:
    """{sha256: token} of tokens.json.  Raises: unavailable."""
    text = read_text(disk, path)
    try:
        rows = [] if text is None else load_json(text)["tokens"]
        return {row["sha256"]: Token(str(row["user"]), row["sha256"], parse_time(row["created_at"]),
                                     parse_time(row["expires_at"]) if row.get("expires_at") else None)
                for row in rows}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NexusError("unavailable", f"{path} is not as nexus writes it: {error!r}",
                         hint="repair it, or move it away and make the tokens anew: nexus token create USER") from None


def change_tokens(disk: Disk, path: str, act: Callable[[Mapping[str, Token]], Mapping[str, Token]]) -> None:
    """Replace the tokens by act(tokens).  Raises: unavailable; what `act` raises."""
    make_folder(disk, os.path.dirname(path))
    with disk_errors("write", path), open_file(disk, f"{path}.lock", os.O_RDWR | os.O_CREAT) as lock:
        disk.lock(lock, waits=True)
        rows = [token_json(token) for token in act(read_tokens(disk, path)).values()]
        write_atomic(disk, path, [json.dumps({"tokens": rows}, indent=1) + "\n"])

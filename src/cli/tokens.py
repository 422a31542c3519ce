"""`nexus token`: rows of a file, the first of which can be made before the service runs."""

from __future__ import annotations

import functools
import os
import time

from ..machine.clock import Clock
from ..machine.disk import find_user
from ..machine.tokens import add_token, change_tokens, read_tokens, revoke_tokens, token_json
from ..opening import TYPE_CHECKING
from ..values.text import format_time, refuse
from ..views.job_tables import Column, format_table
from ..views.status_text import local_time
from .context import Context
from .transport import DISK

if TYPE_CHECKING:
    from typing import Any


def cmd_token_create(context: Context) -> None:
    options, now = context.options, time.time()
    user, text = options.user, options.token or Clock().new_token()
    if user == find_user(os.geteuid()):
        refuse(f"{user} owns this service, and a token in that name would be good for all of its jobs",
               hint=f"choose another name; the owner's own token is in {context.layout.token_file}")
    expires_at = None if options.days is None else now + options.days * 86400
    change_tokens(DISK, context.layout.tokens_file, lambda tokens: add_token(tokens, user, text, expires_at, now))
    context.print(text)
    end = local_time(format_time(expires_at), "%Y-%m-%d %H:%M") if expires_at else "it is revoked"
    context.say(f"it lets {user} in until {end}; it is shown only now")
    context.say(f"use: NEXUS_TOKEN=..., or curl -H 'Authorization: Bearer ...'; to end it: nexus token revoke {user}")


def cmd_token_list(context: Context) -> None:
    now = format_time(time.time()) or ""
    tokens = [token_json(token) for token in read_tokens(DISK, context.layout.tokens_file).values()]

    def describe_token(token: dict[str, Any]) -> str:
        if token["expires_at"] is None:
            return "good"
        words = "good until" if token["expires_at"] > now else "expired"
        return f"{words} {local_time(token['expires_at'], '%Y-%m-%d %H:%M')}"

    context.show(tokens, functools.partial(format_table, (
        Column("USER", cell=lambda token: token["user"], colour="bright", is_free=True),
        Column("SHA-256", cell=lambda token: token["sha256"][:12]),
        Column("MADE", cell=lambda token: local_time(token["created_at"], "%Y-%m-%d %H:%M"), colour="cyan"),
        Column("STATE", cell=describe_token),
    )), "nobody has a token; nexus token create USER makes one")


def cmd_token_revoke(context: Context) -> None:
    change_tokens(DISK, context.layout.tokens_file, lambda tokens: revoke_tokens(tokens, context.options.token))
    context.say("it is refused from now on; jobs go on")

"""`nexus node`: machines are added, listed, removed."""

from __future__ import annotations

import functools
import os
import re
import time

from ..formats.codec import encode_value
from ..hosting.node import NOT_REACHED
from ..machine.clock import wait_until
from ..machine.ssh import SSH_TIMEOUT_S
from ..opening import TYPE_CHECKING
from ..values.config import parse_node
from ..values.errors import NexusError
from ..values.text import format_count, format_line, join_some
from ..views.job_tables import Column, format_table
from ..views.status_text import describe_node_state
from .context import Context
from .transport import encode_query, quote_path

if TYPE_CHECKING:
    from typing import Any


def cmd_node_add(context: Context) -> None:
    """Have the service send jobs to another machine: it brings this nexus.py there."""
    options = context.options
    user, _, host = options.host.rpartition("@")
    facts = {"name": options.name, "host": host, "user": user, "jump": options.jump, "port": options.port,
             "identity_file": options.identity and os.path.abspath(os.path.expanduser(options.identity))}
    config = parse_node({key: fact for key, fact in facts.items() if fact})

    def look() -> dict[str, Any]:
        return next(node for node in context.client.nodes() if node["name"] == config.name)

    if config.name in [node["name"] for node in context.client.nodes()[1:]]:
        raise NexusError("conflict", f"there is a node {config.name} already",
                         hint=f"nexus node list; to change its address: nexus node remove {config.name}, then add it")
    context.say(f"reaching {config.destination}")
    context.client.ask("POST", "/nodes", encode_value(config))
    wait_until(lambda: look()["trouble"] != NOT_REACHED, SSH_TIMEOUT_S, 0.05)
    node = look()
    if not node["is_reachable"]:
        remove_node(context, config.name, is_forced=True)
        hint = re.sub("(, or give it up)?: nexus node remove .*", "", node["hint"] or "nexus node list")
        raise NexusError("unavailable", node["trouble"], hint)
    models = f" ({join_some(list(map(format_line, node['gpu_names'])), 8)})" if node["gpu_names"] else ""
    context.print(f"{config.name}: {format_count(node['gpus'], 'GPU')}{models}, Python {node['python']}")
    if node["trouble"]:
        context.say(f"{config.name}: {node['trouble']}")


def format_address(node: dict[str, Any]) -> str:
    return "@".join(filter(None, (node["user"], node["host"]))) if node["host"] else "here"


def cmd_node_list(context: Context) -> None:
    nodes = context.client.nodes()
    context.show(nodes, functools.partial(format_table, (
        Column("NODE", cell=lambda node: node["name"], colour="bright", is_free=True),
        Column("ADDRESS", cell=format_address, is_free=True),
        Column("GPUS", cell=lambda node: str(node["gpus"])),
        Column("MODEL", cell=lambda node: ", ".join(node["gpu_names"]), is_free=True),
        Column("JOBS", cell=lambda node: str(node["running_jobs"])),
        Column("STATE", cell=describe_node_state, colour="yellow"),
    )))
    for node in nodes:
        if node["hint"]:
            context.say(f"{node['name']}: {node['hint']}")


def cmd_node_remove(context: Context) -> None:
    name = context.options.name
    remove_node(context, name, context.options.force)
    context.say(f"{name} is removed; its nexus and what it kept are still there")


def remove_node(context: Context, name: str, is_forced: bool) -> None:
    """Remove a node; return when its last job has ended."""
    context.client.ask("DELETE", f"/nodes/{quote_path(name)}" + encode_query({"force": "true" if is_forced else None}))
    told = 0
    while True:
        node = next((node for node in context.client.nodes()[1:] if node["name"] == name), None)
        if node is None:
            return
        if node["running_jobs"] not in (0, told):
            told = node["running_jobs"]
            context.say(f"{name} gets no more jobs; {format_count(told, 'job')} there still "
                        f"{'runs' if told == 1 else 'run'} (Ctrl-C leaves it to end by itself; --force gives them up)")
        time.sleep(0.1)

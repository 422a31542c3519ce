"""All nodes: those that are used, and what is known of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..schedule.capacity import may_run_on
from ..schedule.reasons import NodeView
from ..values.config import NodeConfig
from ..values.errors import NexusError
from ..values.job import Job, needs_folder
from ..values.state import KnownNode, Put
from ..values.text import format_count, format_duration, format_line, join_some, suggest
from ..values.value import replace
from .loop import Component
from .node import Node

if TYPE_CHECKING:
    from typing import Any

    from ..service.service import Service

NODE_ALARM_S = 30.0             # health turns bad when a node has been silent for so long
MAX_FOLDERS = 1000              # of how many of the first pending jobs nodes are asked for their directories


class NodePool(Component):
    """The other machines: one Node for each in State, in the order in which they were added."""

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.nodes: Mapping[str, Node] = {}                 # replaced as a whole: other threads iterate over it
        self.waiting: Sequence[Job] = ()                    # the first pending jobs that need a directory
        self.lock = threading.RLock()                       # held by those who check a node and then change it

    def set_node(self, name: str, recorded: KnownNode | None) -> None:
        """Record a node, and keep a Node for it; None: forget it.  Raises: unavailable."""
        with self.lock:
            self.store.update(lambda state: [Put("nodes", name, recorded)] if state.nodes.get(name) != recorded else [])
            node = self.nodes.get(name)
            if node and (recorded is None or node.is_ended or node.address != recorded.config):
                node.end()
                node = None
            if recorded:
                node = node or Node(self.service, recorded.config, recorded.is_leaving)
                node.is_leaving = recorded.is_leaving
            self.nodes = {key: other for key, other in {**self.nodes, name: node}.items() if other}

    def begin_nodes(self) -> None:
        """Connect to all nodes.  One with running jobs stays as it was until they end, whatever config.toml says."""
        busy = {job.current.node for job in self.service.running_jobs() if job.current.node}
        configured = {node.name: node for node in self.config.nodes}
        kept = dict(self.store.state.nodes)
        for name, recorded in kept.items():
            if name in configured and name in busy and is_elsewhere_now(recorded.config, configured[name]):
                self.log.error("Node %s is %s in config.toml, but jobs run on %s: when they have ended, nexus restart",
                               name, configured.pop(name).destination, recorded.config.destination)
        for name, config in configured.items():
            self.set_node(name, KnownNode(config, was_configured=True))
        for name, recorded in kept.items():
            if name not in configured:                      # was_configured: it has been removed from config.toml
                is_gone = recorded.was_configured and name not in busy
                kept_node = replace(recorded, is_leaving=recorded.is_leaving or recorded.was_configured)
                self.set_node(name, None if is_gone else kept_node)

    def add_node(self, config: NodeConfig, who: str) -> None:
        """Add a node, or reconnect to a known one.  Raises: conflict, unavailable."""
        if self.service.is_slurm:
            raise NexusError("conflict", 'jobs run under Slurm here (launcher = "slurm"), which chooses their machines',
                             hint="[jobs] launcher: nexus config edit")
        if config.name == self.service.node:
            raise NexusError("conflict", f"{config.name} is this machine's name", hint="choose another: --name n1")
        with self.lock:
            former = self.nodes.get(config.name)
            is_configured = any(node.name == config.name for node in self.config.nodes)
            if former and is_configured and former.address != config:
                raise NexusError("conflict", f"{config.name} has another address in config.toml",
                                 hint="nexus config edit, then nexus restart")
            if former and is_elsewhere_now(former.address, config) and any(
                    job.current.node == config.name for job in self.service.running_jobs()):
                raise NexusError("conflict",
                                 f"{config.name} is another machine, {former.address.destination}, where jobs run",
                                 hint="choose another name: --name n1")
            self.set_node(config.name, KnownNode(config, was_configured=is_configured))
            node = self.nodes[config.name]
            node.given_up_by = ""
            node.follower.wanted.set()
        self.log.info("Node %s (%s) added by %s", config.name, config.destination, who)
        self.service.wake()

    def remove_node(self, name: str, is_forced: bool, who: str) -> None:
        """Forget a node when its jobs have ended; `is_forced`: now, with its jobs.  Raises: not_found, conflict."""
        with self.lock:
            node = self.find_node(name)
            if any(other.name == name for other in self.config.nodes):
                raise NexusError("conflict", f"{name} is in config.toml", hint="remove it there, then nexus restart")
            self.set_node(name, KnownNode(node.address, is_leaving=True))
            node.given_up_by = who if is_forced else ""
        self.log.info("Node %s is being removed by %s", name, who)
        self.service.wake()

    def find_node(self, name: str) -> Node:
        """Raises: not_found."""
        nodes = self.nodes
        if name not in nodes:
            raise NexusError("not_found", f"there is no node '{format_line(name, 60)}'",
                             hint=suggest(name, nodes) or "nexus node list")
        return nodes[name]

    def view_nodes(self) -> list[NodeView]:
        """The nodes for plan()."""
        now, home = self.clock.monotonic(), os.path.expanduser("~")
        return [NodeView(node.name, node.hello.cpu_slots if node.hello else 0, node.find_reason(now),
                         frozenset([home, *(path for path, is_there in node.reports.folders.items() if is_there)]))
                for node in self.nodes.values()]

    def list_nodes(self) -> list[dict[str, Any]]:
        """GET /nodes: this machine, then the others."""
        jobs = [job.current.node for job in self.service.running_jobs()]
        here = NodeConfig(self.service.node, "", self.service.user)

        def describe(node: Node | None) -> dict[str, Any]:
            """None: this machine."""
            address, gpus = (node.address, node.reports.gpus) if node else (here, self.service.gpu_watch.gpus)
            hello, error, is_leaving = (node.hello, node.error, node.is_leaving) if node else (None, None, False)
            if node is None:
                reason = self.service.observer.observation.error
            elif error:
                reason = error.message
            else:
                reason = (node.reports.find_limit() or node.reports.gpu_error
                          or node.start_backoff.find_error(self.clock.monotonic()))
            return {
                "name": address.name,
                "gpus": len(gpus),
                "gpu_names": sorted({gpu.name for gpu in gpus}),
                "running_jobs": jobs.count(node.name if node else ""),
                "host": address.host or None,
                "port": address.port or None,
                "jump": address.jump or None,
                "identity_file": address.identity_file or None,
                "python": hello.python if hello else None,
                "path": hello.path if hello else None,
                "screen": hello.screen if hello else None,
                "user": address.user or None,
                "is_reachable": error is None,
                "is_leaving": is_leaving,
                "trouble": reason or None,
                "hint": error.hint if error else None,
                "unknown_since": node.since if node and error else None}

        return [describe(node) for node in (None, *self.nodes.values())]

    def take_stock(self) -> None:
        """Have each node told what is wanted there now; forget a leaving node when nothing runs there."""
        home = os.path.expanduser("~")
        pending = sorted(self.store.state.pending.values(), key=lambda job: job.queue_key) if self.nodes else []
        self.waiting = [job for job in pending[:MAX_FOLDERS] if needs_folder(job) and job.cwd != home]
        for node in list(self.nodes.values()):
            self.service.run_guarded(f"asking node {node.name}", node.questions.ask_anew)
            is_told = node.error is not None or node.questions.has_none
            if node.is_leaving and is_told and not node.list_own():
                with self.lock:
                    if node.is_leaving and self.nodes.get(node.name) is node:   # it was not added again
                        self.set_node(node.name, None)
                        self.log.info("Node %s is removed", node.name)

    def list_folders(self, node: Node) -> tuple[str, ...]:
        """The directories of the pending jobs that may run on a node: it is told of no others."""
        return tuple(dict.fromkeys(job.cwd for job in self.waiting if may_run_on(job, node.name)))

    def number_nodes(self) -> dict[str | None, int]:
        """{machine: its number in /api}; this one is 0."""
        return {name: number for number, name in enumerate((self.service.node, *self.nodes))}


def check_node(node: Node, now: float) -> tuple[bool, str]:
    """(whether a node is healthy, its description).  `now`: monotonic.  A short silence is healthy."""
    silence_s, error = now - node.heard_at, node.error
    if error:
        return silence_s < NODE_ALARM_S, f"not heard for {format_duration(silence_s)}: {error.message}"
    faults = [f"GPU {gpu.local_place}: {gpu.fault}" for gpu in node.reports.gpus if gpu.fault]
    if node.reports.gpu_error and node.reports.gpus:
        faults.append(node.reports.gpu_error)
    limit = node.reports.find_limit()
    if limit:
        faults.append(limit)
    if faults:
        return False, join_some(faults, 3, "; ")
    return True, format_count(len(node.reports.gpus), "GPU")


def is_elsewhere_now(recorded: NodeConfig, config: NodeConfig) -> bool:
    """Whether the name belongs to another machine in `config`."""
    return (recorded.destination, recorded.port) != (config.destination, config.port)

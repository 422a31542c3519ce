"""GET /status: what the service tells of itself, its GPUs, its nodes, and what runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..formats.nvidia_smi import forget_readings
from ..hosting.loop import Component
from ..opening import TYPE_CHECKING, __version__
from ..schedule.capacity import describe_collection, describe_kept
from ..schedule.turns import find_next_turn, suppose_want
from ..values.job import CANCELLED, COMPLETED, FAILED, PRIORITIES
from ..values.queue_order import list_holds
from ..values.state import State
from ..values.text import parse_duration
from ..views.api_json import PUBLIC_NODE_KEYS, gpu_json, hide_private, other_user_json
from ..views.usage import USAGE_SINCE, usage_json
from .access import Identity
from .health import Check

if TYPE_CHECKING:
    from typing import Any

MAX_HOLDS = 3                   # of groups that are held, among the hints


class ServiceStatus(Component):
    """Describes the service and its GPUs, and what users have used."""

    def describe(self, checks: Sequence[Check] | None = None) -> dict[str, Any]:
        """GET /status.  `checks`: of Health, where they were made already."""
        version, state = self.store.version, self.store.state       # in this order: a version is never too new
        service, cluster = self.service, self.service.cluster
        if checks is None:
            checks = service.health.list_checks()
        queued_by_priority = {name: len(state.prioritized.get(name, ())) for name in PRIORITIES}
        running_jobs = service.job_serializer.describe_jobs(list(state.running.values()))
        held_groups = list(list_holds(state).values())[:MAX_HOLDS]
        return {
            "state_version": version,
            "gpu_status": self.list_gpus(state),
            "others": [other_user_json(user) for user in service.turn_taking.others if user.wants or user.holdings],
            "next_turn": self.describe_next_turn(),
            "is_paused": state.paused,
            "queued_jobs": len(state.pending),
            "queued_by_priority": queued_by_priority,
            "completed_jobs": len(state.ended.get(COMPLETED, ())),
            "failed_jobs": len(state.ended.get(FAILED, ())),
            "cancelled_jobs": len(state.ended.get(CANCELLED, ())),
            "running_jobs": running_jobs,
            **self.describe_service(),
            "no_screen": self.machine.terminal_error,
            "gpu_trouble": service.observer.find_gpu_error(),
            "slurm": cluster.describe() if cluster else None,
            "hints": service.health.list_hints(checks) + held_groups,
            "bad_checks": [row.name for row in checks if not row.is_ok],
            "host": {"name": service.node, **service.gpu_watch.machine_use},
            "nodes": service.pool.list_nodes() if service.pool.nodes else []}

    def describe_for(self, caller: Identity, checks: Sequence[Check] | None = None) -> dict[str, Any]:
        """GET /status, as the caller may see it."""
        status = {**self.describe(checks), "is_owner": caller.is_owner}
        if not caller.is_owner:
            status.update(
                home=None, hints=[], nodes=[hide_private(node, PUBLIC_NODE_KEYS) for node in status["nodes"]],
                running_jobs=[caller.show(job["user"], job) for job in status["running_jobs"]])
        return status

    def list_gpus(self, state: State) -> list[dict[str, Any]]:
        """Return the GPUs of all machines, for the API."""
        now, nodes, shown = self.clock.monotonic(), self.service.pool.nodes, []
        reasons = {node.name: node.find_reason(now) for node in nodes.values()}
        left = {capacity.gpu.uuid: f"is left to {capacity.turn_of}, whose turn it is{describe_collection(capacity)}"
                for capacity in self.service.plan.gpus if capacity.turn_of}
        kept = {capacity.gpu.uuid: capacity for capacity in self.service.plan.gpus
                if capacity.reserved_for in state.pending and capacity.free > 0 and not capacity.turn_of}
        left.update({uuid: f"is kept for {describe_kept(capacity)}" for uuid, capacity in kept.items()})
        for gpu in self.service.gpu_watch.see_gpus(state):
            reason = reasons.get(gpu.node) if gpu.node else self.service.observer.observation.error
            is_unread = bool(reason) and (not gpu.node or nodes[gpu.node].error is not None)
            if gpu.node and is_unread:                  # its last readings are too old
                gpu = forget_readings(gpu)
            row = gpu_json(gpu, state, self.config.gpu, reason if is_unread else None,
                           gpu.node or self.service.node, None if is_unread else reason or left.get(gpu.uuid))
            is_kept = gpu.uuid in kept and row["unavailable"] == left[gpu.uuid]
            shown.append({**row, "kept_for": kept[gpu.uuid].reserved_for if is_kept else None})
        return shown

    def describe_next_turn(self) -> dict[str, Any] | None:
        """Who gets the next GPU of this box that somebody waits for; None: there are no others, or nobody can tell."""
        box, now = self.service.plan.box, self.clock.now()
        if box and not self.store.state.pending:        # then it is told of a job that may be added
            box = suppose_want(box, now)
        found = find_next_turn(box, self.service.plan.find_free(), None, now) if box else None
        if not (box and found):
            return None
        uid, at = found
        return {"user": box.names[uid], "seconds": round(at - now, 1) if at < float("inf") else None}

    def describe_service(self) -> dict[str, Any]:
        return {"version": __version__, "hash": self.service.hash, "pid": os.getpid(), "user": self.service.user,
                "home": self.layout.home, "url": self.service.url,
                "uptime_seconds": round(self.clock.monotonic() - self.service.started_monotonic, 3)}

    def list_usage(self, caller: Identity, since_s: float | None, by: str) -> list[dict[str, Any]]:
        """GET /usage: of the last `since_s` seconds; None: as USAGE_SINCE."""
        now = self.clock.now()
        since = max(0.0, now - (parse_duration(USAGE_SINCE) if since_s is None else since_s))
        others_s = self.service.gpu_history.measure_others(since) if by == "user" else 0.0
        return usage_json(self.store.state, by, since, now, caller.may_see, others_s)

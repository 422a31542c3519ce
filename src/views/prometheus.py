"""Prometheus' text format, version 0.0.4; and the words of `nexus health`.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.job import PENDING, RUNNING
from .status_text import Paint

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

GPU_METRICS = (                                 # name, help, key of the GPU, one of it in the metric's unit
    ("memory_used_bytes", "GPU memory in use, by whomever.", "memory_used_mib", 2**20),
    ("memory_total_bytes", "GPU memory there is.", "memory_total_mib", 2**20),
    ("utilization_ratio", "Utilization of the GPU as the driver tells it, 0 to 1.", "utilization", 0.01),
    ("temperature_celsius", "Temperature of the GPU.", "temperature", 1),
    ("power_watts", "Power the GPU draws.", "power_watts", 1),
    ("allocated_ratio", "How much of the GPU nexus has given to jobs, 0 to 1.", "allocated", 1),
)

Samples = Sequence[tuple[Mapping[str, str], float]]     # (labels, number)


def list_metrics(status: Json, health: Json,
                 end_counts: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, str, Samples]]:
    """(name, help, samples) of each metric.

    `status`, `health`: the replies of GET /status and GET /health.
    `end_counts`: {(status, cause): jobs that have ended since the service began}.
    """
    gpus = [({"node": gpu["node"], "gpu": gpu["place"].rpartition(":")[2], "name": gpu["name"],
              "uuid": gpu["uuid"].removeprefix(f"{gpu['node']}/")}, gpu)      # as its driver says it, and others there
            for gpu in status["gpu_status"]]
    for name, help, key, unit in GPU_METRICS:
        yield f"nexus_gpu_{name}", help, [(labels, gpu[key] * unit) for labels, gpu in gpus if gpu[key] is not None]
    yield "nexus_node_up", "1 when the machine can be reached: this one, and each node.", [
        ({"node": node["name"]}, node["is_reachable"]) for node in status["nodes"]]
    yield "nexus_jobs", "Jobs that wait or run.", [
        ({"status": PENDING}, status["queued_jobs"]), ({"status": RUNNING}, len(status["running_jobs"]))]
    yield "nexus_queue_paused", "1 when the whole queue is paused.", [({}, status["is_paused"])]
    yield "nexus_jobs_finished_total", "Jobs that have ended; no cause for completed ones.", [
        ({"status": word, "cause": cause}, count) for (word, cause), count in end_counts.items()]
    yield "nexus_check_ok", "The checks of GET /health: 1 when well.", [
        ({"check": row["name"]}, row["is_ok"]) for row in health["checks"]]


def format_prometheus(metrics: Iterable[tuple[str, str, Samples]]) -> str:
    lines, escapes = [], str.maketrans({"\\": r"\\", "\n": r"\n", '"': r'\"'})
    for name, help, samples in metrics:
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
        for labels, number in samples:
            text = ",".join(f'{label}="{word.translate(escapes)}"' for label, word in labels.items())
            lines.append(f"{name}{{{text}}} {number + 0}" if text else f"{name} {number + 0}")      # True + 0 is 1
    return "\n".join([*lines, ""])


def format_health(health: Mapping[str, Any], paint: Paint) -> str:
    lines = [f"{'ok  ' if row['is_ok'] else paint('red', 'BAD ')} {row['name']}"
             f"{row['reading'] and ': '}{row['reading']}"
             for row in health["checks"]]
    return paint.join([*lines, paint("green", "HEALTHY") if health["is_healthy"] else paint("red", "UNHEALTHY")])

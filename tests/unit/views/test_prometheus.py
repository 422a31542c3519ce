"""Health and metrics in words."""

import json

import pytest
from makers import finished, gpu
from shown import COLOURFUL, PLAIN, listed, status, uncoloured

import nexus


def test_format_health():
    health = {"is_healthy": False, "checks": [
        {"name": "GPUs", "is_ok": True, "reading": "4 read 2s ago"},
        {"name": "disk", "is_ok": False, "reading": "0GB left"}]}
    assert nexus.format_health(health, PLAIN) == "ok   GPUs: 4 read 2s ago\nBAD  disk: 0GB left\nUNHEALTHY\n"


METRICS = [  # reason, jobs, part of what `nexus metrics` says
    ("nothing yet", [], "Total Jobs: 0\nAvg Execution Time: unknown\nMedian Execution Time: unknown\n\nGPU"),
    ("mean, median", [finished("aaa", runtime_seconds=1.0), finished("bbb", status="failed", cause="timeout", runtime_seconds=2.0),
                              finished("ccc", status="failed", cause="exit", runtime_seconds=6.0),
                              finished("ddd", status="cancelled", started_at=None, runtime_seconds=0.0, cause="killed")],
     "Total Jobs: 4 (1 completed, 2 failed, 1 cancelled)\nAvg Execution Time: 3s\nMedian Execution Time: 2s\n"),
    ("GPUs", [], "GPU Utilization (last hour):\n  GPU 0: 45.2% avg, 99% peak\n  GPU 1: unknown avg, unknown peak (PAUSED)\n"),
]


@pytest.mark.parametrize("reason, jobs, part", METRICS, ids=[case[0] for case in METRICS])
def test_metrics(reason, jobs, part):
    seen = status(gpus=[gpu(0, utilization_mean=45.25, utilization_peak=99.0), gpu(1, is_paused=True)])
    made = nexus.make_metrics(seen, listed(*jobs))
    assert part in nexus.format_metrics(made, PLAIN), reason
    assert uncoloured(nexus.format_metrics(made, COLOURFUL)) == nexus.format_metrics(made, PLAIN)
    assert json.loads(json.dumps(made)) == made and made["total_jobs"] == sum(made["by_status"].values())

"""What tests of views share: a status, paints, jobs as the API shows them.

    made = status([running("abc", [0])], trouble="nvidia-smi is silent")
    assert "abc" in str(nexus.list_top(made, [], 0, [], [], PLAIN))
"""

import re

from makers import NOW, config, gpu, state

import nexus

PLAIN, COLOURFUL, TERMINAL = nexus.Paint(""), nexus.Paint("a-mark"), nexus.Paint("", 80)

FAILED = nexus.Attempt(1, "n2", gpu_indices=(0, 1), started_at=NOW - 60, finished_at=NOW, runtime_seconds=60.04, exit_code=3,
                       cause="exit", cause_line="no data", last_line="done", peak_rss_mib=512.0)


def status(jobs=(), gpus=None, trouble=None, **facts):
    """What GET /status answers; of one idle GPU, if not said otherwise."""
    made, gpus = state(*jobs), [gpu(0)] if gpus is None else gpus
    return {
        "is_paused": False, "queued_jobs": len(made.pending),
        **{f"{word}_jobs": sum(one.status == word for one in made.jobs.values()) for word in nexus.FINAL},
        "gpu_trouble": trouble,
        "gpu_status": [nexus.gpu_json(one, made, config().gpu, trouble) for one in gpus],
        "running_jobs": [{**nexus.job_json(one, NOW, "here"), "rss_mib": 2048.0, "cpu_percent": 99.5}
                         for one in made.running.values()],
        "hints": [], "bad_checks": [], "nodes": [], "version": "0.1.0", "uptime_seconds": 3600.4,
        "queued_by_priority": {"high": 1, "normal": 2, "low": 0},
        "host": {"name": "gpu1", "cpu_percent": 12.0, "memory_used_gb": 40.25, "memory_total_gb": 128.0}, **facts}


def uncoloured(text):
    return re.sub("\x1b\\[[0-9]+m", "", text)


def listed(*jobs, **facts):
    return [{**nexus.job_json(one, NOW, "here"), **facts} for one in jobs]

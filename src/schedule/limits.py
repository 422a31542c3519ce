"""The limits of one job, of time, memory and more: when one is reached, and when to warn."""

from __future__ import annotations

from ..values.config import LIMITS, JobsConfig
from ..values.job import Job, Limits, Use
from ..values.text import format_duration, format_memory, parse_duration


def find_limits(job: Job, config: JobsConfig) -> Limits:
    """The limits of a job.  They are the head's, wherever it runs; what Job has a field for is the job's own."""
    limits = {key: getattr(config, key) for key in (*LIMITS, "kill_grace_seconds")}
    own = {key: getattr(job, key) for key in LIMITS if getattr(job, key, None) is not None}
    name, factor = "timeout_seconds", config.timeout_multiplier
    if job.timeout_seconds is not None:
        name = "its time limit"
    elif job.expected_time is not None:
        own["timeout_seconds"] = job.expected_time * factor
        name = f"{factor:g} times its expected time (timeout_multiplier)"
    return Limits(**{**limits, **own, "timeout_name": name, "warn": job.warn})


def find_stop(limits: Limits, use: Use) -> tuple[str, str] | None:
    """(the cause, the words) for which a running job must be ended: the limit that it has reached; None: none."""
    key, limit_s, most_gb, idle_minutes = "", limits.timeout_seconds, limits.max_memory_gb, limits.idle_kill_minutes
    if limit_s and use.runtime_s is not None and use.runtime_s >= limit_s:
        key, took = "timeout_seconds", format_duration(use.runtime_s)
        words = f"stopped after {took}: {limits.timeout_name} is {format_duration(limit_s)}"
    elif most_gb and (use.memory_mib or 0) > most_gb * 1024:
        key, took = "max_memory_gb", format_memory(use.memory_mib or 0, 2)
        words = f"its processes took {took} of host memory; max_memory_gb is {most_gb:g}"
    elif idle_minutes and use.idle_s >= idle_minutes * 60:
        key = "idle_kill_minutes"
        words = f"its GPUs did nothing for {format_duration(use.idle_s)}; idle_kill_minutes is {idle_minutes:g}"
    return (LIMITS[key], words) if key else None


def find_warning(limits: Limits, runtime_s: float | None) -> str | None:
    """The signal of --warn, if it is time for it."""
    if limits.warn is None or not limits.timeout_seconds or runtime_s is None:
        return None
    signal, _, before = limits.warn.partition("@")
    return signal if runtime_s >= limits.timeout_seconds - parse_duration(before) else None

"""What `nexus` prints: GPUs, running jobs and the queue, with colours.

The command line makes it from the API's replies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.config import is_usual
from ..values.job import CANCELLED, FAILED, PRIORITIES
from ..values.text import count_columns, format_count, format_duration, format_indices, format_known, format_line, parse_time
from .api_json import format_progress
from .row_labels import label_rows

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Json

# White is bold: the terminal's default colour is readable on its background, and white is not on a light one.
COLOURS = {"white": "1", "green": "92", "bright": "1", "cyan": "36", "blue": "34", "yellow": "33", "red": "31",
           "magenta": "35"}


class Paint:
    """Makes the text for a terminal from lines that may hold other people's words, with or without colours.

    `mark` is an unguessable word, or empty for no colours.  It stands for the escape character until join() has cleaned
    the lines: nexus's own colours stay, and escape sequences in a job's command or in a reply from NEXUS_URL do not.
    `width`, `height`: the terminal's columns and lines; 0 for a file or a pipe, where nothing is cut.
    """

    def __init__(self, mark: str, width: int = 0, height: int = 0) -> None:
        self.mark, self.width, self.height = mark, width, height

    def __call__(self, colour: str, text: str) -> str:
        return f"{self.mark}[{COLOURS[colour]}m{text}{self.mark}[0m" if self.mark and text and colour else text

    def join(self, lines: Iterable[str]) -> str:
        """The lines with their newlines.  Everything that the command line prints passes here."""
        clean = "".join("\t".join(map(format_line, line.split("\t"))) + "\n" for line in lines)
        return clean.replace(self.mark, "\x1b") if self.mark else clean


def local_time(stamp: str | None, pattern: str = "%H:%M") -> str:
    """A UTC time of the API in the reader's time zone; `-` for none."""
    return "-" if stamp is None else time.strftime(pattern, time.localtime(parse_time(stamp)))


def format_history(status: Json) -> str:
    """`History: 61 jobs completed, 7 failed, 2 cancelled`."""
    others = [f", {status[f'{word}_jobs']} {word}" for word in (FAILED, CANCELLED) if status[f"{word}_jobs"]]
    return f"History: {format_count(status['completed_jobs'], 'job')} completed{''.join(others)}"


def format_snapshot(status: Json, paint: Paint, table: Sequence[str] = ()) -> str:
    """The output of `nexus`.  `table`: lines that stand for GPUs and running jobs, where these have no room."""
    status = {**status, "running_jobs": label_for_terminal(status["running_jobs"], paint)}
    paused, url = "[PAUSED]" if status["is_paused"] else "[RUNNING]", status.get("url", "")
    queued = f"Queue: {format_count(status['queued_jobs'], 'job')} pending"
    lines = [f"{paint('blue', queued)} {paint('yellow', paused)}",
             paint("white", format_history(status)),
             *([] if is_usual(url) else [f"Page: {url}"]), ""]
    slurm = status.get("slurm")
    if slurm:
        submitted = format_count(slurm["handed_jobs"] + slurm["running_jobs"], "job")
        heading = paint("white", f"Slurm ({slurm['cluster']}):" if slurm["cluster"] else "Slurm:")
        lines.append(f"{heading} {submitted} of nexus there, {slurm['running_jobs']} running")
        lines += [paint("red", slurm["trouble"])] if slurm["trouble"] else []
        for partition in slurm["partitions"]:
            state = paint("green" if partition["state"] == "up" else "red", partition["state"])
            lines.append(f"Partition {partition['name']}{' (default)' if partition['is_default'] else ''}: {state}, "
                         f"{partition['gpus_used']} of {format_count(partition['gpus'], 'GPU')} in use, "
                         f"time limit {partition['time_limit']}")
    else:
        lines.append(paint("white", "GPUs:"))
    gpu_lines = table or list_gpu_lines(status, paint)
    if status["gpu_trouble"]:
        lines.append(paint("red", status["gpu_trouble"]))
    lines += gpu_lines or ([] if status["gpu_trouble"] or slurm else ["none"])
    lines += ["", paint("white", SHARED), *format_others(status, paint)] if status.get("others") else []
    on_gpus = {job_id for gpu in status["gpu_status"] for job_id in gpu["job_ids"]}
    running = status["running_jobs"]
    elsewhere = {
        "Running there:": [job for job in running if job["slurm_id"]],
        "CPU:": [job for job in running if not job["slurm_id"] and not job["gpus"]],
        "On GPUs that cannot be seen now:": [
            job for job in running if not job["slurm_id"] and job["gpus"] and job["id"] not in on_gpus]}
    for heading, jobs in elsewhere.items() if not table else ():
        lines += ["", paint("white", heading)] if jobs else []
        lines += [line for job in jobs for line in format_running(job, paint, bool(status["nodes"]))]
    lines += ["", *(f"hint: {hint}" for hint in status["hints"])] if status["hints"] else []
    return paint.join(lines)


SHARED = "Other users of these GPUs, who take turns with you:"


def format_others(status: Json, paint: Paint) -> list[str]:
    """`bob: 4 running, 60 waiting since 15:30`, each, and who is next; [] where nobody else is.  An older service
    tells of nobody."""
    lines = []
    for other in status.get("others", ()):
        since = f" since {local_time(other['since'])}" if other["since"] else ""
        collects = f", collects {other['collects']} GPUs for one job" if other["collects"] else ""
        lines.append(f"{paint('yellow', other['user'])}: {other['running']} running, {other['waiting']} waiting{since}"
                     f"{collects}")
    if lines and (turn := status["next_turn"]):
        is_own = status.get("is_owner") and turn["user"] == status["user"]
        seconds, who = turn["seconds"], "yours" if is_own else turn["user"]
        when = ("when a job ends" if seconds is None else "at any moment" if seconds < 1
                else f"in about {format_duration(seconds)}")
        supposed = " if you add a job" if is_own and not status["queued_jobs"] else ""
        lines.append(f"Next GPU: {paint('green' if is_own else 'yellow', who)}{supposed}, {when}")
    return lines


def list_gpu_lines(status: Json, paint: Paint) -> list[str]:
    """The GPUs of all machines; of a node that gets no jobs, the reason and the GPUs with jobs."""
    jobs = {job["id"]: job for job in status["running_jobs"]}
    lines = [line for gpu in status["gpu_status"] if not status["nodes"] or gpu["node"] == status["nodes"][0]["name"]
             for line in format_gpu(gpu, jobs, paint)]
    for node in status["nodes"][1:]:
        gpus, bad = [gpu for gpu in status["gpu_status"] if gpu["node"] == node["name"]], format_bad_node(node, paint)
        lines += bad
        lines += [line for gpu in gpus if gpu["job_ids"] or not bad for line in format_gpu(gpu, jobs, paint)]
    return lines


def format_bad_node(node: Json, paint: Paint) -> list[str]:
    """Why a node gets no jobs, and what to do; [] of one that gets some."""
    if (state := describe_node_state(node)) == "ok":
        return []
    return [paint("red" if node["unknown_since"] else "yellow", f"{node['name']}: {state}"),
            *([f"  {node['hint']}"] if node["hint"] else [])]


def describe_node_state(node: Json) -> str:
    error = node["trouble"] or ""
    if node["unknown_since"]:
        return f"unknown since {local_time(node['unknown_since'], '%m-%d %H:%M')}{error and f': {error}'}"
    return "is being removed: it gets no more jobs" if node["is_leaving"] else error or "ok"


def format_gpu(gpu: Json, jobs: Mapping[str, Json], paint: Paint) -> list[str]:
    what = ", ".join(part for part in (gpu["name"], gpu["memory_total"]) if part)
    header = paint("white", f"GPU {gpu['place']} ({what}):")
    running = [line for job_id in gpu["job_ids"] if job_id in jobs for line in format_running(jobs[job_id], paint)]
    if running:
        note = paint("yellow", "[PAUSED]") if gpu["is_paused"] else ""
        note = paint("red", gpu["fault"]) if gpu["fault"] else note
        others = [f"  Also used by: {paint('yellow', gpu['used_by'])}"] if gpu["used_by"] else []
        return [f"{header} {note}".rstrip(), *running, *others]
    text = describe_idle_gpu(gpu)
    colour = {"Available": "green", "Fault": "red"}.get(gpu["state"], "" if gpu["used_by"] else "yellow")
    return [f"{header} {paint(colour, text[:1].upper() + text[1:])}"]


def describe_idle_gpu(gpu: Json) -> str:
    """`available`, `in use by bob (pid 4242 python)`, or why no job may have it."""
    if gpu["is_available"]:
        return "available"
    if gpu["used_by"]:
        return f"in use by {gpu['used_by']}"
    return str(gpu["unavailable"] or "is not available").removeprefix("is ")


def format_running(job: Json, paint: Paint, has_node: bool = False) -> list[str]:
    """`has_node`: show its machine."""
    runtime = format_duration(job["runtime_seconds"] or 0)
    stopping = "".join(f" ({word})" for word in list_states(job))
    if job["unknown_since"]:
        stopping += paint("red", f" unknown since {local_time(job['unknown_since'], '%m-%d %H:%M')}")
    share = [f"  GPUs: {format_known(job['gpus'], '', 2)}"] if job["gpus"] % 1 else []
    command = cut_end(name_or_command(job), job["command"], paint.width and max(20, paint.width - 11))
    progress = format_progress(job)
    return [f"  Job ID: {paint('magenta', job['id'])}{stopping}",
            *([f"  Node: {job['node']}"] if has_node else []), *share,
            f"  Command: {paint('bright', command)}",
            *([f"  Slurm: {job['slurm_id']} on {job['node']}"] if job["slurm_id"] else []),
            f"  Runtime: {paint('cyan', runtime)}",
            *([f"  Progress: {paint('cyan', progress)}"] if progress else []),
            f"  Started: {paint('cyan', local_time(job['started_at']))}"]


def list_states(job: Json) -> list[str]:
    """What is special about a running job."""
    count = job["processes_left"]
    left = "1 process goes on" if count == 1 else f"{count} processes go on"
    return [*([f"stopping: {job['stopping']}"] if job["stopping"] else []),
            *([f"its command has ended, {left}"] if count else []),
            *([f"idle for {show_idle(job)}"] if job["idle_since"] else []),
            *([job["unrecorded"]] if job["unrecorded"] else [])]


def show_idle(job: Json) -> str:
    began_at, idle_since = parse_time(job["started_at"]), parse_time(job["idle_since"])
    return format_duration(max(0.0, (job["runtime_seconds"] or 0.0) - (idle_since - began_at)))


def describe_machine(machine: Json) -> str:
    """`CPU 12%, memory 31 of 64GB`."""
    if machine["memory_total_gb"] is None:
        return "CPU and memory unknown: psutil is not installed"
    memory = f"{format_known(machine['memory_used_gb'], '')} of {format_known(machine['memory_total_gb'], 'GB')}"
    return f"CPU {format_known(machine['cpu_percent'], '%', 0)}, memory {memory}"


def format_detailed(status: Json, health: Json, paint: Paint) -> str:
    """`nexus status --detailed`."""
    bands, machine = status["queued_by_priority"], status["host"]
    lines = [
        paint("white", "nexus status"), "=" * 50, f"Version: {status['version']}",
        f"Status: {'paused' if status['is_paused'] else 'running'}",
        f"Uptime: {status['uptime_seconds']:.0f} seconds ({format_duration(status['uptime_seconds'])})",
        f"Jobs Processed: {status['completed_jobs'] + status['failed_jobs']}", "",
        paint("white", "Queue Status:"), f"  Total Jobs: {status['queued_jobs']}",
        *(f"  {band.title()} Priority: {bands[band]}" for band in PRIORITIES), "",
        paint("white", "GPU Resources:"), *("  " + paint("red", error) for error in [status["gpu_trouble"]] if error),
        *(describe_gpu_use(gpu, paint) for gpu in status["gpu_status"])]
    if status["nodes"]:
        lines += ["", paint("white", "Nodes:"), *(
            f"  {node['name']}: {format_count(node['gpus'], 'GPU')}, {format_count(node['running_jobs'], 'job')}, "
            + paint("red" if node["unknown_since"] else "bright", describe_node_state(node))
            for node in status["nodes"])]
    lines += ["", f"Host: {machine['name']}, {describe_machine(machine)}",
              "", f"Active Jobs: {len(status['running_jobs'])}"]
    for job in status["running_jobs"]:
        progress = format_progress(job)
        memory = (f", memory {format_known(job['rss_mib'] and job['rss_mib'] / 1024, 'GB')}, "
                  f"CPU {format_known(job['cpu_percent'], '%')}")
        gpus = f"GPUs: [{format_indices(job['gpu_places'])}]" if job["gpu_places"] else "no GPU"
        lines.append(f"  {paint('magenta', job['id'])}: {paint('bright', name_or_command(job))}"
                     f" ({job['node'] + ', ' if status['nodes'] else ''}"
                     f"{gpus}{memory}{progress and f', {progress}'})")
    lines += ["", f"Health: {paint('green', 'HEALTHY') if health['is_healthy'] else paint('red', 'UNHEALTHY')}"]
    return paint.join(lines + [f"hint: {hint}" for hint in status["hints"]])


def describe_gpu_use(gpu: Json, paint: Paint) -> str:
    allocated = f"{gpu['allocated'] * 100:.0f}% allocated"
    if gpu["is_paused"]:
        allocated = paint("yellow", "PAUSED") + (f", {allocated}" if gpu["job_ids"] else "")
    readings = [f"memory {gpu['memory_used']} of {gpu['memory_total']}" if gpu["memory_used"] else "memory unknown",
                *(words.format(gpu[key]) for key, words in (
                    ("utilization", "{:.0f}% busy"), ("temperature", "{:.0f}°C"), ("power_watts", "{:.0f} W"))
                  if gpu[key] is not None)]
    notes = "" if gpu["job_ids"] or gpu["is_paused"] or not gpu["unavailable"] else f"; {gpu['unavailable']}"
    notes += f"; also used by {gpu['used_by']}" if gpu["job_ids"] and gpu["used_by"] else ""
    return f"  GPU {gpu['place']}: {allocated} ({', '.join(readings)}){notes}"


def name_or_command(job: Json) -> str:
    """`name: command`; instead of the name, what tells a row from others, where label_for_terminal() has found that."""
    if job["command"] is None:                  # another user's job, seen with a token
        return f"({job['user']}'s)"
    name = job.get("label") or job["name"]
    return f"{name}: {job['command']}" if name else str(job["command"])


def label_for_terminal(jobs: Sequence[Json], paint: Paint, seen: Sequence[Json] = ()) -> list[dict[str, Any]]:
    """Jobs of one list, or of several that are `seen` together, with their labels.

    In a file or a pipe, where nothing is cut, they have their names.
    """
    labels = label_rows(seen or jobs) if paint.width else {}
    return [{**job, "label": labels.get(job["id"])} for job in jobs]


LEAST_END = 16                  # columns of what is cut, below which it is left out


def cut_end(text: str, end: str | None, width: int) -> str:
    """A text of at most so many columns, unless 0; what is cut is the `end` that it has, as long as there is some."""
    begin = text.removesuffix(end or "")
    room = width - count_columns(format_line(begin))
    if not width or not begin or not end or count_columns(format_line(text)) <= width:
        return format_line(text, width)
    return format_line(begin) + format_line(end, room) if room >= LEAST_END else format_line(begin.rstrip(": "), width)


def format_priority(priority: int) -> str:
    return next((name for name, number in PRIORITIES.items() if number == priority), str(priority))

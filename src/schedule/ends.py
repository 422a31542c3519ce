"""What becomes of a job whose attempt has ended, here or in Slurm; what its end says of its group and its GPU."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence

from ..formats.cause_lines import find_cause_lines, find_oom_line
from ..formats.runner_events import News, Result
from ..formats.slurm import REQUEUED_BY_SLURM, SLURM_ENDS, SLURM_KILLS, SlurmJob
from ..opening import TYPE_CHECKING
from ..values.causes import CUDA_OOM, EXIT, KILLED, LAUNCH, NODE_FAIL, REQUEUED, SESSION_LOST, SIGNAL, get_cause
from ..values.changes import add_notes
from ..values.config import GpuConfig, JobsConfig
from ..values.job import CANCELLED, COMPLETED, FAILED, PENDING, Job, Usage
from ..values.state import Group
from ..values.value import Value, replace

if TYPE_CHECKING:
    from typing import Any


class Evidence(Value):
    """What is known of an attempt besides its exit code."""
    stderr: str = ""                            # the end of its stderr
    log_sizes: tuple[int, int] = (0, 0)         # of stdout.log and stderr.log, in bytes
    error: str | None = None                    # what went wrong with its logs
    samples: Usage = Usage()
    stdout: str = ""                            # the end of its stdout
    last_line: str | None = None                # the last line that it printed
    metric_line: str | None = None              # the last line with numbers


def judge_end(job: Job, result: Result, evidence: Evidence, runtime_s: float, config: JobsConfig,
              now: float) -> tuple[str, dict[str, Any]]:
    """(the next status of a job whose attempt ended, the attempt's facts); `pending` means another attempt."""
    code = result.exit_code
    number = code - 128 if code is not None and 128 < code < 160 else None
    cause, line = find_cause(job, result, evidence, number)
    finished_at = max(min(result.finished_at or now, now), job.current.started_at or 0)     # another clock may be wrong
    notes = [evidence.error] if evidence.error and evidence.error != line else []
    facts = {"exit_code": code, "signal": number, "cause": cause, "cause_line": line, "finished_at": finished_at,
             "last_line": evidence.last_line, "metric_line": evidence.metric_line,
             "runtime_seconds": runtime_s, "processes_left": None,
             "notes": add_notes(job.current.notes, notes), **vars(evidence.samples),
             "log_base": tuple(map(max, job.log_base, evidence.log_sizes))}
    if cause is None:
        return COMPLETED, facts
    row, is_launch = get_cause(cause), cause == LAUNCH
    if row.cancels or row.requeues:
        return CANCELLED if row.cancels else PENDING, facts
    again = sum((attempt.cause == LAUNCH) == is_launch for attempt in job.attempts[:-1]
                if not get_cause(attempt.cause).requeues)
    is_over = again >= job.retries
    if is_launch:
        is_over = not (result.may_pass and again + 1 < config.launch_attempts)
    if is_over:
        return FAILED, facts
    return PENDING, {**facts, "retry_at": now + find_backoff_s(config.retry_backoff_seconds, again),
                     "exclusive": job.exclusive or cause == CUDA_OOM}


def find_backoff_s(first_s: float, count: int) -> float:
    """The backoff after an attempt, `count` such ones before it: it doubles each time, up to an hour."""
    return min(first_s * 2.0 ** min(count, 20), max(3600.0, first_s))


REBOOT_BACKOFF_S = 60.0         # for a job whose machine goes down with it for the second time


def find_reboot_backoff_s(job: Job) -> float:
    """The backoff of a job whose machine went down while it ran: none at first.  Each attempt is kept with the job."""
    count = sum(attempt.cause == REQUEUED and attempt.pid is not None for attempt in job.attempts[:-1])
    return find_backoff_s(REBOOT_BACKOFF_S, count - 1) if count else 0.0


def find_cause(job: Job, result: Result, evidence: Evidence, signal: int | None) -> tuple[str | None, str | None]:
    """(why an attempt failed, in one word; the line that says so); (None, None) for a success."""
    cause, has_succeeded = job.current.stop_cause, result.ended_itself and result.exit_code == 0
    if cause and not (has_succeeded and cause != KILLED):
        return cause, job.current.stop_line
    if result.cause:
        return result.cause, result.cause_line
    if result.exit_code == 0:
        return None, None
    if job.gpus and not evidence.error and (line := find_oom_line(evidence.stderr)):
        return CUDA_OOM, line
    texts = [evidence.stderr] if signal else [evidence.stderr, evidence.stdout]
    line = next((line for text in texts for line in find_cause_lines(text, 1)), None)
    return SIGNAL if signal else EXIT, evidence.error or line


LACK_OF_MEMORY = "killed (SIGKILL); the kernel ended a process for lack of memory in these seconds"


def explain_kill(job: Job, result: Result, before: int | None, now: int | None) -> Result:
    """The result of an attempt, with the kernel's lack of memory as its cause where SIGKILL ended it meanwhile.

    `before`, `now`: how many processes the kernel had ended for that at the last reading but one, and has now; None:
    unknown.
    """
    is_killed = result.exit_code == 128 + 9 and not result.cause and not job.current.stop_cause
    is_lacking = before is not None and now is not None and now > before
    return replace(result, cause=SIGNAL, cause_line=LACK_OF_MEMORY) if is_killed and is_lacking else result


# What becomes of a job that Slurm has

class Claim(Value):
    """Whose an attempt is: its job.sh's, or with pid 0 the service's, which keeps a late job.sh from beginning."""
    pid: int
    started: int                                # clock ticks since boot
    began: int | None = None                    # when its job.sh had its GPUs, before checkout and conda; None: not yet
    is_open: bool = False                       # it is empty: its job.sh is about to write it, or was ended before


OPEN_CLAIM, OUR_CLAIM = Claim(0, 0, is_open=True), Claim(0, 0)
MACHINE_DOWN = "the machine went down while it ran"
ENDED_EARLY = "its job.sh was ended before it began"


def match_slurm_jobs(live: Iterable[Job], jobs: Sequence[SlurmJob]) -> dict[str | None, SlurmJob]:
    """{slurm_key: Slurm's job}.  An id alone proves little: after a crash, slurmctld may give it to another job."""
    by_key = {slurm_job.key: slurm_job for slurm_job in jobs if slurm_job.key}
    by_id = {slurm_job.id: slurm_job for slurm_job in jobs if slurm_job.key is None}
    asked = [(job.current.slurm_key, job.current.slurm_id) for job in live]
    pairs = ((key, by_key.get(key or "") or by_id.get(slurm_id or "")) for key, slurm_id in asked)
    return {key: slurm_job for key, slurm_job in pairs if key and slurm_job}


def judge_slurm_end(seen: SlurmJob | None, claim: Claim | None, result: Result | None, over_s: float, line: str,
                    folder: str) -> News | None:
    """What became of a job that has been over, or unknown to Slurm, for `over_s` seconds; None: too early to say.

    `claim`: of its attempt; a service's keeps its job.sh from beginning.  `line`: the most telling line of slurm.log.
    """
    state = seen.state if seen else ""
    if not result and claim and claim.is_open and state in ("", "COMPLETED", "FAILED", REQUEUED_BY_SLURM):
        return News(requeue=ENDED_EARLY) if over_s >= 60.0 else None    # the text may be late, like a result
    if not result and (claim == OUR_CLAIM if claim else state in ("", REQUEUED_BY_SLURM)):
        return News(requeue=f"Slurm has not begun it as {seen.id}" if seen else "Slurm does not have it")
    # A shared file system may show the result late, and slurmctld may yet have the job killed that it requeues.
    wait_s = 60.0 if claim and state in ("COMPLETED", REQUEUED_BY_SLURM) else 3.0
    if result or over_s >= wait_s or state in ("NODE_FAIL", "BOOT_FAIL"):
        return News(result=make_slurm_end(seen, claim, result, line, folder))
    return None


def make_slurm_end(seen: SlurmJob | None, claim: Claim | None, result: Result | None, line: str, folder: str) -> Result:
    """How an attempt ended: as Slurm says if Slurm ended it, else as its result says.

    A job that wrote its result was not ended by the failure of its node, or of slurmctld, unless slurmstepd says so.
    """
    words, cause = f"Slurm: {line}" if line else "", SLURM_ENDS[seen.state] if seen else None
    slurmstepd_cause = next((cause for pattern, cause in SLURM_KILLS if re.search(pattern, line)), None)
    if not cause and not (seen and result):
        cause = slurmstepd_cause
    if result and (result.cause or not cause or (cause == NODE_FAIL and not slurmstepd_cause)):
        return result
    node = f" on {seen.nodes}" if seen and seen.nodes else ""
    reason = f" ({seen.reason})" if seen and seen.reason not in ("", "None", "NonZeroExitCode") else ""
    was = f"Slurm: job {seen.id} was {seen.state}{reason}{node}" if seen else ""
    ended_at, started_at = (seen.ended_at, seen.started_at) if seen else (None, None)
    took_s = max(0.0, ended_at - started_at) if ended_at and started_at else None
    if cause:
        return replace(result or Result(None, ended_at, took_s), cause=cause, cause_line=words or was)
    if claim and claim.pid:
        return Result(None, ended_at, took_s, SESSION_LOST,
                      words or f"its job.sh was killed{node}: the exit code is not known")
    advice = f", and its job.sh did not begin: {folder} must be on a file system that the nodes share" if node else ""
    return Result(None, ended_at, 0.0, LAUNCH, was + advice + (f" ({words})" if words else ""))


GROUP_FAILURES = 3              # a group is held if this many of its first jobs all fail soon


def count_group_end(group: Group, status: str, cause: str | None, is_soon: bool, line: str, has_more: bool) -> Group:
    """The group after one of its jobs has ended.  If the first GROUP_FAILURES jobs all fail soon, the rest is held."""
    if group.failures < 0 or group.hold or get_cause(cause).cancels:
        return group
    if status != FAILED or not is_soon:
        return replace(group, failures=-1)
    failures = group.failures + 1
    if failures < GROUP_FAILURES:
        return replace(group, failures=failures)
    hold = (f"its first {failures} jobs failed soon after their start, the last with: {line} "
            f"(fix the error, then: nexus resume --group {group.name})")
    return replace(group, failures=0, hold=hold if has_more else None)


class Ended(Value):
    """An ended attempt, as the guard against bad GPUs remembers it."""
    gpu_uuids: tuple[str, ...]
    command: str                # or the name of the script that came with the job: such jobs have the same command
    is_success: bool
    is_soon: bool               # it failed within guard_seconds of its start
    started_at: float


def find_bad_gpu(ended: Sequence[Ended], uuid: str, config: GpuConfig) -> str | None:
    """Why a GPU should get no more jobs: its jobs fail soon, one after the other, and such jobs run well elsewhere.

    A failure counts only if the same program has meanwhile succeeded on other GPUs, and has not failed on them.
    """
    import itertools
    def program(end: Ended) -> list[str]:       # all jobs of a sweep have the same
        return end.command.split()[:2]
    there = (end for end in reversed(ended) if uuid in end.gpu_uuids and (end.is_success or end.gpu_uuids == (uuid,)))
    latest = list(itertools.takewhile(operator.attrgetter("is_soon"), there))       # since the last other end
    if not config.guard_failures or len(latest) < config.guard_failures:
        return None
    since = min(end.started_at for end in latest)
    elsewhere = [end for end in ended if end.gpu_uuids and uuid not in end.gpu_uuids and end.started_at >= since]
    faulty = [program(end) for end in elsewhere if end.is_soon]
    good = [program(end) for end in elsewhere if end.is_success]
    counted = [end for end in latest if program(end) in good and program(end) not in faulty]
    if len(counted) < config.guard_failures or len({end.command for end in counted}) < 2:
        return None
    return (f"{len(counted)} jobs in a row failed there within {config.guard_seconds:g} s of their start, "
            "and run elsewhere")

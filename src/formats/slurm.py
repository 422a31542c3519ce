"""What Slurm's programs print, and what sbatch is given.

Times are in UTC; fields are separated by |, and the one that may hold | comes last.
Source: squeue(1), sbatch(1), src/common/slurm_errno.c and slurm_protocol_defs.c.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote

from ..values.causes import HOST_MEMORY, KILLED, NODE_FAIL, PREEMPTED, TIMEOUT
from ..values.config import SlurmConfig
from ..values.job import Job, Limits
from ..values.schema import FLAG, INTEGER, STRING
from ..values.text import check_time, cut_words, format_line, parse_time
from ..values.value import Value, field
from .cause_lines import find_last_lines

SLURM_ID = "[0-9]{1,12}"
SBATCH_ANSWER = rf"(?m)^({SLURM_ID})(;\S*)?$"    # the id, and maybe the cluster; warnings may stand around it
SQUEUE_FORMAT = "%i|%T|%S|%e|%N|%r|%j|%k"       # id, state, start, end, nodes, reason, name, comment
SLURM_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
REQUEUED_BY_SLURM = "REQUEUED"                  # the state, for nexus, of a job that waits again after it began
SLURM_ENDS: Mapping[str, str | None] = {        # {a state in which a job has ended: its cause; None: see its exit code}
    "COMPLETED": None, "FAILED": None, "CANCELLED": KILLED, "TIMEOUT": TIMEOUT, "DEADLINE": TIMEOUT,
    "OUT_OF_MEMORY": HOST_MEMORY, "NODE_FAIL": NODE_FAIL, "BOOT_FAIL": NODE_FAIL, "PREEMPTED": PREEMPTED,
    "REVOKED": KILLED, REQUEUED_BY_SLURM: NODE_FAIL}
# {what slurmstepd writes into slurm.log when it ends a job: the cause}, for a job that Slurm forgot or calls FAILED
SLURM_KILLS = (("DUE TO TIME LIMIT", TIMEOUT), ("DUE TO NODE FAILURE", NODE_FAIL),
               ("DUE TO PREEMPTION", PREEMPTED), ("CANCELLED AT", KILLED),
               ("(?i)memory limit|oom.kill|out.of.memory", HOST_MEMORY))


class SlurmJob(Value):
    id: str
    state: str                                  # Slurm's word; it runs unless in SLURM_WAITING or SLURM_ENDS
    reason: str = ""
    nodes: str = ""
    started_at: float | None = None             # of a waiting job: Slurm's estimate
    ended_at: float | None = None
    key: str | None = None                      # Attempt.slurm_key; "": not this service's; None: unknown


class SlurmPartition(Value):
    name: str = field(STRING, "its name")
    state: str = field(STRING, "Slurm's word: up, down, drain or inactive")
    is_default: bool = field(FLAG, "jobs get it when no other is asked for")
    time_limit: str = field(STRING, "in Slurm's form: 1-00:00:00, or UNLIMITED")
    gpus: int = field(INTEGER, "GPUs of its nodes")
    gpus_used: int = field(INTEGER, "of these, given to jobs of anybody")


def parse_slurm_partitions(partitions: str, nodes: str) -> tuple[SlurmPartition, ...]:
    """Parse the output of `scontrol show partition -o` and of `scontrol show node -d -o`."""
    gpus: dict[str, list[tuple[int, int]]] = {}         # {partition: (GPUs, GPUs in use) of each of its nodes}
    for facts in map(parse_scontrol, nodes.splitlines()):
        for name in facts.get("Partitions", "").split(","):
            gpus.setdefault(name, []).append((count_gres(facts.get("Gres", "")), count_gres(facts.get("GresUsed", ""))))
    return tuple(SlurmPartition(
        format_line(facts["PartitionName"], 60), format_line(facts.get("State", "unknown").lower(), 60),
        facts.get("Default") == "YES", format_line(facts.get("MaxTime", "?"), 60),
        *map(sum, zip(*gpus.get(facts["PartitionName"], [(0, 0)]))))
        for facts in map(parse_scontrol, partitions.splitlines()) if "PartitionName" in facts)


def parse_scontrol(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show ... -o`; some hold blanks."""
    found = re.findall(r"(?:^|(?<=\s))([A-Z][A-Za-z:/&-]*)=(.*?)(?=\s+[A-Z][A-Za-z:/&-]*=|\s*$)", line)
    return dict(found)


def count_gres(text: str) -> int:
    """GPUs of `gpu:a100:2(S:0-1),gpu:1,shard:8`, `gpu:a100:1(IDX:0,2)` or `gpu:(null):1(IDX:0)`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,]*)?:(\d{1,6})\b", re.sub(r"\([^)]*\)", "", text))
    return sum(map(int, counts))


def parse_slurm_jobs(text: str, service_id: str) -> list[SlurmJob]:
    """Parse the output of `squeue -h -r -o SQUEUE_FORMAT`."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 7)
        if len(cells) < 8 or not re.fullmatch(SLURM_ID, cells[0]):
            continue                            # a warning, or a task of an array
        slurm_id, state, start, end, nodes, reason, name, comment = cells
        before, _, token = comment.partition(f"nexus:{service_id}:")
        key: str | None = token if not before else ""
        if not key and name.startswith("nexus_") and "nexus:" not in comment:
            key = None                          # the comment is lost, and with it whose it is
        found.append(SlurmJob(slurm_id, state, cut_words(reason), cut_words(nodes), parse_slurm_time(start),
                              parse_slurm_time(end), key))
    return found


def parse_slurm_time(text: str) -> float | None:
    """UTC epoch seconds of `2024-10-24T15:30:15`; None for `N/A`, `Unknown`, `None`, and what is out of range."""
    try:
        return check_time(parse_time(f"{text}Z"))
    except (OverflowError, ValueError):
        return None


def build_sbatch(job: Job, service_id: str, folder: str, limits: Limits, config: SlurmConfig) -> list[str]:
    """The command that submits a job.  Slurm's time limits are minutes; % is special in the path of --output."""
    options = {"partition": config.partition, "account": config.account, "qos": config.qos}
    if job.gpus:
        options["gres"] = f"gpu:{job.gpu_type}:{job.gpus}" if job.gpu_type else f"gpu:{job.gpus}"
    if limits.timeout_seconds:
        options["time"] = f"{-(-limits.timeout_seconds // 60):.0f}"
    if limits.max_memory_gb:
        options["mem"] = f"{limits.max_memory_gb * 1024:.0f}M"
    return ["sbatch", "--parsable", "--export=ALL", "--no-requeue", "--open-mode=append", "--chdir=/",
            *config.extra_args, *(f"--{name}={text}" for name, text in options.items() if text),  # the last counts
            f"--job-name=nexus_{job.id}", f"--comment=nexus:{service_id}:{job.current.slurm_key}",
            f"--output={folder.replace('%', '%%')}/slurm-{job.attempt}.log",
            "--wrap", f"exec bash {quote(folder)}/job.sh {job.attempt}"]


# (a pattern of sbatch's error, what is at fault, what to do).  `cluster`: Slurm does not answer; `config`: it takes
# none of our jobs; `limit`: not so many at once; `job`: not this one.  Any other error may pass.
SLURM_REFUSALS = (
    ("job queue full|temporarily unable to accept", "limit", "nexus tries again as jobs end"),
    ("Invalid user: ", "cluster", "the name of this user is not found: getent passwd $UID"),
    ("[Mm]unge|Protocol authentication error|authentication plugin", "cluster",
     "munged must run here: munge -n | unmunge"),
    ("Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)|Zero Bytes"
     "|Communication (connection|shut)|not responding|Unable to establish|in standby mode"
     r"|[Uu]nable to process configuration|establish a configuration source|slurm\.conf", "cluster",
     "nexus goes on when Slurm answers; see: scontrol ping"),
    ("[Ii]nvalid (partition|account|qos|user id|node name|feature|option|--)|partition not available"
     "|group not permitted|Access/permission denied|not authorized|unrecognized option|unknown option"
     "|requires an argument|reservation is invalid", "config",
     "see [slurm] partition, account, qos and extra_args (nexus config edit), then nexus restart"),
    (r"\b(Assoc|QOS)(?!\w*Submit)\w*(GRES|TRES|C[Pp][Uu]|Node|Mem|Wall|Billing)", "job", "ask for less"),
    ("job submit limit|violates accounting/QOS policy|Too many jobs|[Ll]imit on number of jobs|job limit", "limit",
     "nexus tries again as jobs end"),
    ("node configuration is not available|Memory specification|time limit is invalid|Invalid generic resource"
     "|More processors requested|Node count specification|CPU count", "job", "ask for less"))


def read_refusal(words: str) -> tuple[str, str]:
    """(what is at fault, what to do) for an error of sbatch or squeue; both empty when it is unknown."""
    return next(((fault, hint) for pattern, fault, hint in SLURM_REFUSALS if re.search(pattern, words)), ("", ""))


def clean_slurm_words(text: str) -> str:
    """The output of a Slurm program as one line, without the program's name."""
    own = r"^(\w+: (error: |fatal: )?)?((Batch job submission failed|slurm_load_jobs error): )?"
    lines = [re.sub(own, "", line.strip()) for line in text.splitlines()]
    return format_line("; ".join(dict.fromkeys(line for line in lines if line and not line.startswith("Try "))), 400)


def find_slurm_line(text: str) -> str:
    """The most telling line of a slurm.log: what slurmstepd did to the job, or else the last."""
    lines = find_last_lines(text, 50)
    own = [match[1] for line in lines for match in [re.match(r"slurmstepd\S*: error: (.+)", line)] if match]
    told = [line for line in own if re.search(r"\*\*\*|oom|memory", line)]
    return format_line((told or own or lines or [""])[-1].strip("* "), 300)


def describe_submitted(job: Job, seen: SlurmJob | None, error: str | None = None) -> str:
    """Why a job that Slurm has waits.  `error`: why Slurm does not answer, or takes no job."""
    if job.current.slurm_id is None:
        where = "it is being submitted to Slurm" if not job.current.stop_cause else "it is taken out of Slurm's queue"
    else:
        where = f"Slurm has it as {job.current.slurm_id}"
        if seen and not error:
            reason = seen.reason.strip("()") if seen.state in SLURM_WAITING else seen.state
            where += f": {reason}" if reason not in ("", "None") else ""
    return f"{where}; {error}" if error else where

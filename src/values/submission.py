"""A submission: what it may hold, and the jobs that it makes.

The command line sends the whole `environment`; other clients send `env`, which is added to the service's own.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence

from ..opening import TYPE_CHECKING
from .errors import NexusError
from .job import BEGIN_TEXT, COMMAND, MAX_JOBS, VARIABLES, Job
from .schema import FLAG, LINE, NODE_NAME, STRING, check, integer_in, keep, list_of, object_of, read_object
from .sweep import MAX_SWEEP_BYTES, fill_template, keep_quotes, list_combinations, parse_sweep, spread_sweep
from .text import format_known, join_some, refuse, suggest
from .value import Field, Value, optional

if TYPE_CHECKING:
    from typing import Any, NoReturn

EACH_KEYS = {**{name: Job.FIELDS[name] for name in (
    "command", "name", "group", "cwd", "sweep_values", "template")},
             "env": Field(VARIABLES, "its own variables, on top of those that all of them have", default={})}
EACH = object_of(EACH_KEYS, "one of several jobs", required=["command"],
                 examples=[{"command": "python train.py --lr 0.1", "env": {"SEED": "1"}}])
MAX_OWN_VARIABLES = 65536       # bytes of one job's


class Asked(Value):
    """A checked submission: the fields that its Job keeps, and the others."""
    job: Mapping[str, Any]                      # the given fields of Job
    env: Mapping[str, str] = optional(
        {}, VARIABLES, "variables on top of the environment", "asked repeats", flag="--env NAME=VALUE",
        like="A_MODE=off", option="a variable on top of the environment; repeatable", label="Environment variables")
    environment: Mapping[str, str] | None = optional(
        None, VARIABLES, "the whole environment instead; for the owner alone", "asked")
    node: str | None = optional(
        None, NODE_NAME, "only on the machine of this name: nexus node list (default: wherever it can start first)",
        "asked", flag="--node NAME", label="Only on this machine")
    max_concurrent: int | None = optional(
        None, integer_in(1, 100000), "how many of its group run at once, from now on", "asked",
        flag="--max-concurrent N", label="At most so many at once", of_group="limit")
    llm: str | None = optional(
        None, LINE, "the GPUs llm_config.json names for this model", "asked", flag="--llm MODEL",
        label="Language model (LLM)")
    begin: str | None = optional(
        None, BEGIN_TEXT, "start no sooner: at the next 22:00, in 2 hours, or at a time", "asked",
        flag="--begin WHEN", like="22:00, +2h", label="Not before")
    after_pid: int | None = optional(
        None, integer_in(1, 4194304), "start when this process of this machine has ended", "asked",
        flag="--after-pid PID", label="After a process has ended (pid)")
    unique: bool = optional(
        False, FLAG, "add nothing if the same waits, runs or has completed", "asked", flag="--unique",
        label="Only if there is no such job")
    unless_active: bool = optional(
        False, FLAG, "add nothing if the same waits or runs", "asked", flag="--unless-active",
        label="Only if no such job waits or runs")
    commands: tuple[str, ...] = optional(
        (), list_of(COMMAND, 1, MAX_JOBS), "instead of command: a job for each of them", "asked")
    names: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_JOBS), "with commands: a name for each of them, instead of name", "asked")
    each: tuple[Mapping[str, Any], ...] = optional(
        (), list_of(EACH, 1, MAX_JOBS), "instead of command: a job for each of them, with what differs between them",
        "asked")
    sweep: tuple[str, ...] = optional(
        (), {**list_of({**STRING, "x-max-bytes": MAX_SWEEP_BYTES}, 1, 20), "examples": [["lr=1e-3,1e-4", "seed=0..4"]]},
        "one NAME=VALUES a line: a job for each combination, with its values in place of {NAME} in the command, name, "
        "group, directory and variables", "asked form", like="lr=1e-3,1e-4\nseed=0..4", label="Sweep over values")
    dry_run: bool = optional(False, FLAG, "check, and add nothing", "asked")


JOB_FIELDS = Job.FIELDS
ASKED: Mapping[str, Field] = {name: row for name, row in {**JOB_FIELDS, **Asked.FIELDS}.items() if row.asked}
SUBMISSION = object_of(ASKED, "a job", nulls=ASKED, required=(),
                       examples=[{"command": "python train.py", "gpus": 1}])
KEPT = [name for name, row in JOB_FIELDS.items() if row.kept]      # what a retry takes over from the first job
GROUP_LIMITS = {name: row.of_group for name, row in Asked.FIELDS.items() if row.of_group}     # {field: Group's}
FOR_GPUS = [name for name, row in JOB_FIELDS.items() if row.for_gpus]


def parse_submissions(data: Any) -> list[Asked]:
    """The jobs of a body of POST /queue, which is a job or a list of jobs.  Raises: usage."""
    if not isinstance(data, list):
        return parse_submission(data)
    if not data:
        refuse("the list of jobs is empty")
    if len(data) > MAX_JOBS:
        refuse(f"the list has {len(data)} jobs; at most {MAX_JOBS} are taken at once", hint="send it in parts")
    return [asked for number, item in enumerate(data, 1)
            for asked in parse_submission(item, f"job {number} of {len(data)}: ")]


def parse_submission(data: Any, where: str = "") -> list[Asked]:
    """One job, or one for each of `commands`.  Raises: usage, whose message begins with `where`."""
    try:
        fields = {name: fact for name, fact in read_object(ASKED, SUBMISSION, data).items() if fact is not None}
        fields = take_sweep(fields) if "sweep" in fields else fields
        check_submission(fields)
    except NexusError as error:
        message = f"{where}{error.message}; none was added" if where else error.message
        raise NexusError(error.kind, message, error.hint or "see nexus help add") from None
    others = {name: fields.pop(name) for name in Asked.FIELDS if name in fields}
    rows: list[dict[str, Any]] = [{"command": command} for command in others.pop("commands", ())]
    for row, name in zip(rows, others.pop("names", ())):
        row["name"] = name
    for row in others.pop("each", ()):
        own = {"variables": tuple(row["env"].items())} if "env" in row else {}
        kept = {key: keep(EACH_KEYS[key], fact, key) for key, fact in row.items() if key != "env"}
        rows.append({**kept, **own})
    return [Asked({**fields, **row}, **others) for row in rows or [{}]]


def take_sweep(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a submission, with the jobs of its sweep in `each`.  Raises: usage."""
    if ("command" in fields) == ("commands" in fields) or {"each", "names"} & fields.keys():
        refuse("sweep is for a command, or for commands without names")
    texts, env = {name: fields[name] for name in ("name", "group", "cwd") if name in fields}, fields.get("env", {})
    sweeps = [parse_sweep(text, refuse_file) for text in fields["sweep"]]
    spread = spread_sweep(sweeps, fields.get("commands") or (fields["command"],), texts, env)
    taken = {"command", "commands", "sweep", "env", *spread.texts}
    left = {name: text for name, text in env.items() if name not in spread.variables}
    return {**{name: fact for name, fact in fields.items() if name not in taken}, **({"env": left} if left else {}),
            "each": check(list_of(EACH, 1, MAX_JOBS), spread.rows, "each")}


def set_values(job: Job, values: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """The fields of a job of a sweep with other values of it, for each combination.

    What was changed since it was added stays.  Raises: usage, when it is of no sweep with all these names.
    """
    template, former = dict(job.template), dict(job.sweep_values)
    if not template:
        refuse(f"job {job.id} has no values that can be set" + (": it was added by an older nexus, or without --sweep"
               if former else ": it is of no sweep"), hint=f"give its whole command: nexus retry {job.id} -- COMMAND")
    for name in values:
        if name not in former:
            refuse(f"job {job.id} has no {name} in its sweep: it has {join_some(list(former))}", suggest(name, former))
    former.update((name[6:], text) for name, text in template.items() if name.startswith("value."))
    texts = {name: text for name, text in template.items() if not name.startswith("value.")}
    before, found = fill_template(texts, former), []
    for combination in list_combinations(list(values.items())):
        now = {**former, **combination}
        row = check(EACH, {**fill_template(texts, now), "template": {**texts, **keep_quotes(now)}}, "set")
        own = {pair: (pair[0], row["env"][pair[0]]) for pair in before.get("env", {}).items()}
        kept = {name: keep(EACH_KEYS[name], fact, name) for name, fact in row.items() if name != "env" and (
            name in ("sweep_values", "template") or getattr(job, name) == before[name])}
        found.append({**kept, "variables": tuple(own.get(pair, pair) for pair in job.variables)})
    return found


def refuse_file(path: str) -> NoReturn:
    refuse(f"sweep: @{path} is a file, and only nexus add --sweep reads files",
           hint=f"write its lines here, with commas between; for the value @{path} itself: @@{path}")


def check_submission(fields: Mapping[str, Any]) -> None:
    """Check that the fields of a submission go together.  Raises: usage."""
    given = [name for name in ("command", "commands", "each") if name in fields]
    if len(given) > 1:
        refuse(f"{given[1]} comes instead of {given[0]}")
    if not given:
        refuse("command is missing")
    if fields.get("names") and len(fields["names"]) != len(fields.get("commands", ())):
        refuse("names has a name for each of commands")
    rows = fields.get("each", ())
    if any(len(json.dumps(row.get("env"))) > MAX_OWN_VARIABLES for row in rows):
        refuse(f"the env of one of `each` is larger than {MAX_OWN_VARIABLES} bytes", hint="write long texts to a file")
    if "group" not in fields and not (rows and all("group" in row for row in rows)):
        refuse_group_limits(fields)
    check_snapshot(fields.get("snapshot"), fields.get("snapshot_repo"), fields.get("cwd", ""))


def refuse_group_limits(given: Container[str]) -> None:
    """Refuse the limits of a group for a job that has none.  Raises: usage."""
    for name in GROUP_LIMITS:
        if name in given:
            refuse(f"{name} is for a group, and this job has none", hint="name one: --group NAME")


def check_snapshot(commit: str | None, repository: str | None, cwd: str) -> None:
    """Raises: usage."""
    if bool(commit) != bool(repository):
        refuse("snapshot and snapshot_repo come together")
    is_inside = (cwd + "/").startswith((repository or "").rstrip("/") + "/")
    if repository and (not is_inside or ".." in f"{cwd}/{repository}".split("/")):
        refuse("snapshot_repo must be a folder that cwd is in, and neither may have ..")


def check_gpus(job: Job) -> None:
    """Check that the GPU fields of a job go together.  Raises: usage."""
    for key in FOR_GPUS if job.gpus == 0 else ():
        if getattr(job, key):
            refuse(f"{key} is for jobs with GPUs, and this one has gpus 0", hint="leave one of the two out")
    if job.gpu_ids is not None and job.gpus > len(job.gpu_ids):
        refuse(f"{format_gpus(job.gpus)} asked for, but only {len(job.gpu_ids)} named in gpu_ids",
               hint="name more, or ask for fewer")


def format_gpus(gpus: float) -> str:
    """`1 GPU`, `0.5 GPU`, `2 GPUs`, `no GPU`."""
    return format_known(gpus, " GPUs" if gpus > 1 else " GPU", 2) if gpus else "no GPU"

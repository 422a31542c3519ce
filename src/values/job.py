"""A job and its attempts: their fields, and which status may follow which.

A Job is a value: a change makes a new Job.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from .causes import CAUSES, REQUEUED, RUNNER_CAUSES, describe_causes
from .config import LIMITS, JobsConfig
from .schema import (
    FLAG,
    FLOAT,
    INTEGER,
    JOB_ID,
    LINE,
    MAX_NAME,
    NO_NUL,
    PATH,
    SECONDS,
    STRING,
    TEXT,
    TIME,
    integer_in,
    list_of,
    matching,
    number_in,
    one_of,
)
from .text import (
    CONTROL,
    ID_PATTERN,
    MAX_ARGUMENT_BYTES,
    MAX_GPUS,
    MAX_TIME,
    SLICE_PLACE,
    ZONE,
    cut_words,
    guess_number,
    parse_duration,
    parse_indices,
    parse_memory,
    sort_gpu_ids,
)
from .value import Field, Value, field, optional, replace

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Schema
    from .state import State

FACT_KINDS: Mapping[str, Field] = {
    "Epoch": Field(number_in(0, MAX_TIME), "UTC epoch seconds: 1970 to 9999"),
    "Span": Field(number_in(0, MAX_TIME), "seconds"),
    "Ticks": Field(integer_in(0, 10**15), "clock ticks since boot"),
    "Amount": Field(number_in(-10**9, 10**15), "what was measured: MiB, percent, watts, degrees, seconds of CPU"),
    "FileSize": Field(integer_in(0, 2**53), "bytes"),
    "Count": Field(integer_in(0, 10**9), "how many"),
    "Index": Field(integer_in(0, 9999), "the number of a GPU, or of a MIG slice"),
    "Pid": Field(integer_in(1, 2**31 - 1), "the pid of a process; nvidia-smi may name one that is not of this kernel"),
    "ExitCode": Field(integer_in(0, 255), "the exit code of a program"),
    "Signal": Field(integer_in(1, 64), "the number of a signal"),
    "Words": Field(STRING, "a text for people, as one harmless line that is cut", convert=cut_words),
    "Name": Field(STRING, "the name of a thing, likewise", convert=lambda text: cut_words(text, 100)),
    "JobId": Field(JOB_ID),
    "AttemptKey": Field(matching(
        f"^{ID_PATTERN}-[0-9]{{1,15}}-[0-9]{{1,9}}$", "a job's id and number and an attempt, like abc-1-1")),
    "Session": Field(matching("^[0-9]{1,10}\\.[A-Za-z0-9_.-]{1,80}$", "screen's PID.NAME")),
    "Uuid": Field(matching("^[A-Za-z0-9][A-Za-z0-9_./-]{0,119}$", "a GPU's UUID")),
    "BootId": Field(matching("^[A-Za-z0-9-]{1,64}$", "the id of a boot")),
    "Commit": Field(matching("^[0-9a-f]{40,64}$", "a commit")),
    "FilePath": Field(matching(f"^/[^{CONTROL[1:-1]}]*$", "an absolute path", **{"x-max-bytes": 4095})),
    "ScreenVariable": Field(matching(
        f"^SCREENDIR=/[^{CONTROL[1:-1]}]*$", "where screen has its sockets", **{"x-max-bytes": 4095})),
    "Limit": Field(one_of(*LIMITS.values()), "what ends a job that has reached a limit"),
    "EndCause": Field(one_of(*RUNNER_CAUSES, *(word for word, row in CAUSES.items() if row.is_reported)),
                      "what ended an attempt, beyond its exit code"),
}
if TYPE_CHECKING:
    Epoch = float
    Span = float
    Amount = float
    Ticks = int
    FileSize = int
    Count = int
    Index = int
    Pid = int
    ExitCode = int
    Signal = int
    Words = str
    Name = str
    JobId = str
    AttemptKey = str
    Session = str
    Uuid = str
    BootId = str
    Commit = str
    FilePath = str
    ScreenVariable = str
    Limit = str
    EndCause = str


PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = STATUSES = ("pending", "running", "completed", "failed", "cancelled")
FINAL = (COMPLETED, FAILED, CANCELLED)
STATUS = one_of(*STATUSES)
SUBMITTED = "submitted"             # to Slurm, in whose queue it waits; it never leaves nexus: see Job.shown_status
LIVE = (SUBMITTED, RUNNING)         # those of a job with a present attempt
TRANSITIONS = {                     # from: to.  A status absent on the left is final.
    PENDING: {RUNNING, SUBMITTED, CANCELLED},
    SUBMITTED: {RUNNING, CANCELLED, PENDING},              # only a running job can fail
    RUNNING: {COMPLETED, FAILED, CANCELLED, PENDING},      # PENDING: another attempt
}
PRIORITIES = {"high": 0, "normal": 1, "low": 2}

# What one request may cost is bounded: it holds up all others while it changes State.
MAX_JOBS = 100000               # jobs that one request adds or names
MAX_PARENTS = 10000             # jobs, or groups, after which one job may start

# The fields that a submission may have.  MAX_ARGUMENT_BYTES is the longest argument that Linux takes.
COMMAND = matching(
    rf"^(?!\s*$){NO_NUL}*$", f"a text that is not empty, in valid Unicode without NUL and of at most "
    f"{MAX_ARGUMENT_BYTES} bytes (put it into a script)", examples=["python train.py"],
    **{"x-max-bytes": MAX_ARGUMENT_BYTES})
VARIABLES: Schema = {
    "type": "object", "writeOnly": True, "maxProperties": 10000,
    "propertyNames": matching("^[^=\\x00]+$", "the name of a variable", **{"x-max-bytes": 1024, "writeOnly": True}),
    "additionalProperties": {**TEXT, "x-max-bytes": MAX_ARGUMENT_BYTES - 1025, "writeOnly": True},
    "examples": [{"WANDB_MODE": "disabled"}]}
SWEEP_VALUES: Schema = {
    "type": "object", "maxProperties": 100, "propertyNames": LINE,
    "additionalProperties": {**TEXT, "x-max-bytes": 65536}, "examples": [{"lr": "0.1", "seed": "1"}]}
TEMPLATE: Schema = {
    "type": "object", "maxProperties": 10000, "propertyNames": {**TEXT, "x-max-bytes": 2048}, "writeOnly": True,
    "additionalProperties": {**TEXT, "x-max-bytes": MAX_ARGUMENT_BYTES, "writeOnly": True},
    "examples": [{"command": "python train.py --lr {lr}"}]}
CONDA = {**LINE, "pattern": "^[^-\\sC][^C]*$".replace("C", CONTROL[1:-1]),
         "title": "a conda environment's name or path"}
GPU_ID = {"anyOf": [integer_in(0, 9999), matching(f"^{SLICE_PLACE}$", "a MIG slice like 0.1")]}
GPU_COUNT = {**number_in(0, MAX_GPUS), "x-decimals": 2, "examples": [0.5],
             "title": f"a number from 0 to {MAX_GPUS} with at most two decimals"}
PRIORITY = integer_in(-1000000, 1000000)
PRIORITY_TEXT = matching("^([Hh][Ii][Gg][Hh]|[Nn][Oo][Rr][Mm][Aa][Ll]|[Ll][Oo][Ww]|-?(0?[0-9]{1,6}|1000000))$",
                        "high, normal, low or a number")
ID_OR_NAME = f"[^\\s,{CONTROL[1:-1]}]+"
OTHERS: Mapping[str, Any] = {               # of a field with other jobs: `abc,abd`, or lines as `nexus add` prints them
    "text": matching(rf"^\s*{ID_OR_NAME}((\s*,\s*|\s+){ID_OR_NAME})*\s*$", "jobs' ids or names, like abc,abd",
                     examples=["abc,abd"], maxLength=2 * MAX_NAME * MAX_PARENTS),
    "like": "abc,abd", "parse": lambda text: text.replace(",", " ").split(),
    "convert": lambda ids: tuple(dict.fromkeys(ids))}
AMOUNT = "[0-9]{1,9}(\\.[0-9]{1,9})?"
DURATION = f"( *{AMOUNT} ?[smhdw])+ *|([0-9]{{1,4}}-)?[0-9]{{1,6}}:[0-5][0-9]:[0-5][0-9]"
DURATION_TEXT = matching(f"^({DURATION}|0)$", "a time with its unit", maxLength=100,
                         examples=["90s", "2h", "1h30m", "1:30:00"])
DAY, CLOCK = "[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "([01]?[0-9]|2[0-3])(:[0-5][0-9]){1,2}"
BEGIN_TEXT = matching(f"^(now|\\+({DURATION})|(({DAY}|today|tomorrow)[ T])?{CLOCK}{ZONE}?)$", "a time", maxLength=100,
                     examples=["22:00", "+2h", "tomorrow 7:00", "2024-10-24 22:00", "2024-10-24T15:30:15Z"])
AGE_TEXT = matching(                            # of the command line: a duration, or since when
    f"^({DURATION}|0|{CLOCK}|(today|yesterday|(mon|tues|wednes|thurs|fri|satur|sun)day|{DAY})([ T]{CLOCK})?)$",
    "a time with its unit, or a day", maxLength=100,
    examples=["24h", "7d", "yesterday", "2024-10-24", "2024-10-24 22:00"])
SIZE_TEXT = matching(f"^{AMOUNT} ?[MGTmgt](i?[Bb])?$", "an amount of memory with its unit", examples=["10G", "500M"])

CHOSEN_BY_SLURM = "wants {}, and which GPUs a job gets is Slurm's to choose"
GROUP_NAMES: Schema = {**list_of(LINE, most=MAX_PARENTS), "examples": [["exp1"]]}


def round_gpus(gpus: float) -> float:
    return int(gpus) if gpus == int(gpus) else round(gpus, 2)


def name_gpu(index: int, mig_slice: int | None) -> str:
    return str(index) if mig_slice is None else f"{index}.{mig_slice}"


class Attempt(Value):
    """One start of a job: where it ran, and how it ended."""
    number: Count = 0                           # of the job's starts; job.sh claims it; if it never ran, the last one's
    node: str = ""                              # where it was started; "" = on this machine
    gpu_indices: tuple[Index, ...] = optional((), list_of(INTEGER), "its GPUs, as the driver counts", "public")
    gpu_uuids: tuple[str, ...] = optional((), list_of(STRING), "and by UUID", "public")
    gpu_slice: Index | None = None              # its one GPU is this MIG slice of the card; None: it has whole cards
    slurm_key: str | None = None                # stands in the comment of Slurm's job
    slurm_id: str | None = optional(None, STRING, "Slurm's own, like 123; null while it is submitted")
    slurm_node: str | None = None               # where Slurm runs it, in Slurm's form: n[1-2]
    nonce: str | None = None                    # marks its processes, in their environment
    boot_id: str | None = None                  # the boot in which it was started
    session: Session | None = optional(None, STRING, "screen's PID.NAME; null without screen")
    pid: Pid | None = optional(None, INTEGER, "of its job.sh")
    pid_started: Ticks | None = None            # that process's start time
    notes: tuple[Words, ...] = optional((), list_of(STRING), "what could not be given as asked, what was ended with it")
    commit: Commit | None = optional(
        None, STRING, "the commit that its directory was at when it began; null: of no work tree, with a snapshot, or "
        "an older nexus ran it")
    started_at: Epoch | None = optional(
        None, TIME, "when its start was decided; on a node or in Slurm, when it began; null: it never ran", "public")
    stop_cause: str | None = None               # why it is being stopped; None: it is not
    stop_by: str | None = None                  # who asked for that
    stop_signal: str | None = None              # the first signal for its processes; None: TERM
    stop_line: Words | None = None              # its cause_line once it has ended
    processes_left: Count | None = optional(
        None, INTEGER, "processes that go on, as its command has ended; null: it has not", "public")
    finished_at: Epoch | None = optional(None, TIME, "null: it goes on", "public")
    runtime_seconds: Span | None = None         # by a monotonic clock
    exit_code: ExitCode | None = optional(None, INTEGER, "null where there is none")
    signal: Signal | None = optional(None, INTEGER, "that ended it, if one did")
    cause: str | None = optional(None, STRING, f"why it did not complete, in a word.  {describe_causes()}")
    cause_line: Words | None = optional(None, STRING, "the line that says so")
    last_line: Words | None = optional(
        None, STRING, "the last line that it printed, or what its progress bar shows; of a completed job, the last "
        "that says more than a bar")
    metric_line: Words | None = optional(
        None, STRING, "the last line that it printed with numbers, like loss=0.31; null: there is none")
    peak_rss_mib: Amount | None = optional(
        None, FLOAT, "host memory of its processes together, shared pages counted once; null without psutil")
    cpu_seconds: Amount | None = optional(None, FLOAT, "CPU time of its processes")
    peak_gpu_mem_mib: Amount | None = optional(None, FLOAT, "GPU memory of its processes on all its GPUs together")
    mean_gpu_util: Amount | None = optional(None, FLOAT, "percent, of its GPUs while it ran")
    is_idle_told: bool = False                  # its GPUs did nothing for idle_minutes, and on_idle was called
    log_start: tuple[FileSize, FileSize] = (0, 0)       # bytes of stdout.log and stderr.log before its start

    @property
    def gpu_places(self) -> tuple[str, ...]:
        """Its GPUs by name, without their node: `0`, or `0.1` for slice 1 of card 0."""
        return tuple(name_gpu(index, self.gpu_slice) for index in self.gpu_indices)


ATTEMPT_FIELDS = frozenset(Attempt.NAMES) - {"number"}


class Usage(Value):
    """What an attempt uses, by the names that its Attempt has for it."""
    peak_rss_mib: Amount | None = None
    cpu_seconds: Amount | None = None
    peak_gpu_mem_mib: Amount | None = None
    mean_gpu_util: Amount | None = None


class Limits(JobsConfig):
    """What ends a job: of [jobs], LIMITS and kill_grace_seconds, as find_limits() makes them.  It goes with the job."""
    timeout_name: Words = ""                    # what sets its timeout_seconds, for people
    warn: str | None = None                     # Job.warn


class Use(Value):
    """What a running job has taken so far of what Limits bound."""
    runtime_s: float | None = None              # None: not known
    memory_mib: float | None = None
    idle_s: float = 0.0                         # for how long all its GPUs have done nothing


class Job(Value):
    id: str = field(JOB_ID, "its name among all jobs kept", "public")
    command: str = field(
        COMMAND, "a shell command, as you would type it", "asked kept form", like="python train.py")
    cwd: str = field(
        PATH, "where it runs (default: here; over the network the home directory)", "asked kept form", flag="--cwd DIR",
        label="Directory", line="directory: {}")
    user: str = field(TEXT, "whose it is", "kept public")
    created_at: Epoch = field(TIME, "when it was submitted", "public")      # UTC epoch seconds, like every _at
    queue_key: tuple[float, ...]                # (rank, priority, place), lower first; its place is at first its number
    environment: str = field(TEXT, "its environment's key in State.environments, a digest", "kept hidden")
    number: int = 0                             # its sequence number: the first job ever has 1
    gpus: float = optional(
        1, {**GPU_COUNT, "title": f"{GPU_COUNT['title']} (to choose GPUs: --gpu-ids)"},
        "how many GPUs; 0.5 shares one, 0 takes a CPU slot (default: [jobs] default_gpus)",
        "asked kept public form", flag="--gpus N", also=("-g",), setting="default_gpus",
        unit="count", label="GPUs", line="GPUs: {}", convert=round_gpus)
    gpu_ids: tuple[Any, ...] | None = optional(
        None, list_of(GPU_ID, 1, MAX_GPUS), "the only GPUs it may have, by index or MIG slice",
        "asked kept public for_gpus", flag="--gpu-ids LIST", like="0-3,5 or 0.1",
        text=matching(r"^[0-9][0-9\s,.-]*$", "a list like 0-3,5", maxLength=20 * MAX_GPUS), parse=parse_indices,
        convert=sort_gpu_ids, label="Only these GPUs", line="only GPUs: {}", slurm=CHOSEN_BY_SLURM)
    only_node: str | None = optional(
        None, TEXT, "the only machine it may run on; in state.json \"\" is this one", "kept",
        slurm="wants a node, and where a job runs is Slurm's to choose")
    excluded_nodes: tuple[tuple[str, str], ...] = ()     # (node, why it cannot run the job)
    gpu_mem_mib: int | None = optional(
        None, {**integer_in(1, 100000000), "title": "a whole number of MiB from 1 to 100000000"},
        "memory that must be free on each of its GPUs", "asked kept public for_gpus",
        flag="--gpu-mem SIZE", like="10G", text=SIZE_TEXT, parse=parse_memory, unit="size",
        label="Free GPU memory", line="GPU memory: {} free on each", slurm=CHOSEN_BY_SLURM)
    gpu_type: str | None = optional(
        None, LINE, "full: no MIG slices; else only GPUs with this in their name", "asked kept public for_gpus",
        flag="--gpu-type NAME", like="A100 or 1g.10gb", label="Kind of GPU")
    priority: int = optional(
        1, PRIORITY, "high, normal, low or a number; lower runs first (default: normal = 1)", "asked public live",
        flag="--priority P", unit="priority", text=PRIORITY_TEXT,
        parse=lambda text: PRIORITIES.get(text.lower(), guess_number(text)))
    name: str | None = optional(
        None, LINE, "a name, shown before its command", "asked kept form live live_in_slurm",
        flag="--name NAME", also=("-n",))
    group: str | None = optional(
        None, LINE, "jobs to be waited for, paused, killed or retried together", "asked kept form live live_in_slurm",
        flag="--group G")
    after: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_PARENTS), "start when these have completed; cancelled when one has not",
        "asked kept repeats", flag="--after ID,...", **OTHERS, label="After these have succeeded")
    after_any: tuple[str, ...] = optional(
        (), list_of(LINE, most=MAX_PARENTS), "start when these have ended, however that was",
        "asked kept repeats", flag="--after-any ID,...", **OTHERS, label="After these have ended")
    after_group: tuple[str, ...] = optional(
        (), GROUP_NAMES, "start when all jobs of this group have completed; cancelled when one has not",
        "asked kept repeats", flag="--after-group G", convert=OTHERS["convert"], label="After a group has succeeded")
    after_any_group: tuple[str, ...] = optional(
        (), GROUP_NAMES, "start when all jobs of this group have ended, however that was",
        "asked kept repeats", flag="--after-any-group G", convert=OTHERS["convert"], label="After a group has ended")
    pending_dependencies: tuple[str, ...] = ()                 # of `after` and `after_any`, those not ended yet
    pending_groups: tuple[str, ...] = ()        # of `after_group` and `after_any_group`, those with jobs not ended yet
    retried_groups: tuple[str, ...] = ()        # the groups of the failures that it does again: it counts for them too
    after_process: tuple[int, int, str] | None = None   # (pid, start time, boot id) after whose end it starts
    key: str | None = None                      # of its submission, in case the client sends it again
    env_digest: str | None = optional(
        None, TEXT, "digest of its `env`: with command, directory and conda what `unique` compares", "kept")
    env_names: tuple[str, ...] = optional(
        (), list_of(STRING), "the variables of `environment` that are its own, and not its shell's", "kept hidden")
    conda: str | None = optional(
        None, CONDA, "activate this conda environment", "asked kept", flag="--conda ENV",
        label="Conda environment", line="conda environment: {}")
    snapshot: str | None = optional(
        None, matching("^[0-9a-f]{40,64}$", "a commit"), "the commit in whose checkout it runs", "asked kept")
    snapshot_repo: str | None = optional(None, PATH, "the work tree of snapshot", "asked kept hidden")
    # a file of Layout.code_folder; its cwd is a folder of its own
    code: str | None = optional(None, TEXT, "the script that came with it", "kept hidden")
    variables: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": STRING}, "its own over those of `environment`, which many share",
        "kept hidden")
    sweep_values: tuple[tuple[str, str], ...] = optional(
        (), SWEEP_VALUES, "what tells it from the other jobs of its sweep: {name: value}", "asked kept", show=dict,
        convert=lambda values: tuple(values.items()))
    template: tuple[tuple[str, str], ...] = optional(
        (), TEMPLATE, "where those values stand, for `set` of a retry: its `command`, `name`, `group`, `cwd` and "
        "`env.NAME` with {name} in place of each; `title`: what its name begins with, if it is made of the values; "
        "`value.NAME`: a value with its quotes", "kept hidden", convert=lambda texts: tuple(texts.items()))
    labels: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": TEXT}, "what its submitter calls it by, for whoever asks",
        "kept", show=dict)
    cuda_arg: bool = optional(
        False, FLAG, "set --cuda in the command to the GPUs' numbers, which are physical then", "asked kept for_gpus",
        flag="--cuda-arg", label="Fill in --cuda", line="set --cuda: {}", slurm=CHOSEN_BY_SLURM)
    tty: bool = optional(
        False, FLAG, "its stdout is a terminal: progress bars and colours as when run by hand", "asked kept",
        flag="--tty", label="Run in a terminal", line="terminal: {}")
    retries: int = optional(
        0, integer_in(0, 1000), "further attempts when it fails", "asked kept live live_in_slurm", flag="--retries N",
        setting="retries", label="Retries after a failure")
    timeout_seconds: float | None = optional(
        None, SECONDS, "stop it after so long; 0 = no time limit", "asked kept public form live",
        flag="--timeout TIME", also=("--time",), like="90s, 30m, 2h", text=DURATION_TEXT, parse=parse_duration,
        unit="duration", label="Time limit", line="time limit: {}")
    expected_time: float | None = optional(
        None, number_in(0.001, 31536000),
        "how long it should take: estimates get better, and it may use reserved GPUs; "
        "stopped at twice that", "asked kept public live",
        flag="--expect TIME", like="30m", text=DURATION_TEXT, parse=parse_duration, unit="duration",
        label="Expected time")
    warn: str | None = optional(
        None, matching(
            f"^(USR1|USR2|INT|TERM|HUP|QUIT)@({DURATION})$", "a signal and a time, like USR1@2m", maxLength=100),
        "a signal for its programs that handle it, so long before its time limit", "asked kept live",
        flag="--warn SIGNAL@TIME", like="USR1@2m", label="Warning signal",
        slurm="wants a warning, which is Slurm's to send: --signal in [slurm] extra_args")
    preemptible: bool = optional(
        False, FLAG, "may be stopped and queued again so that a job without this can start", "asked kept public",
        flag="--preemptible", label="Makes room for others (preemptible)",
        slurm="is preemptible, and Slurm preempts by its own rules: qos in [slurm]")
    umask: int | None = optional(None, integer_in(0, 0o777), "its umask", "asked kept hidden")
    nice: int | None = optional(None, integer_in(0, 19), "its nice value; null: the service's", "asked kept hidden")
    cpus: str | None = optional(
        None, matching(r"^[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*$", "a list like 0-3,8", maxLength=10000),
        "the CPUs that it may use; null: all", "asked kept hidden")
    status: str = PENDING
    status_history: tuple[tuple[str, Epoch], ...] = ()
    attempts: tuple[Attempt, ...] = ()          # the last one is `current`
    retried_as: str | None = optional(None, JOB_ID, "the job that was added to do it again")
    dismissed_by: tuple[str, ...] = ()          # the users to whose failures it does not belong any more
    is_hook_due: bool = False                   # it has ended, and on_finish has yet to run for it
    is_group_due: bool = False                  # it has ended, and on_group_finish has yet to run for its group
    begin_at: float | None = optional(None, TIME, "it was asked not to start before")
    is_held: bool = optional(
        False, FLAG, "it does not start before it is resumed: nexus resume ID", "asked", flag="--hold",
        label="Hold it for now")
    retry_at: Epoch | None = optional(None, TIME, "it does not start again before")
    exclusive: bool = False                      # after a CUDA out-of-memory error: it gets whole GPUs, the emptiest
    log_base: tuple[FileSize, FileSize] = (0, 0)        # bytes of stdout.log and stderr.log of former attempts
    log_dir: str | None = optional(None, STRING, "the folder of its logs")
    WRITTEN = ("status",)                       # a job whose status is lost must not look like a pending one

    @property
    def shown_status(self) -> str:
        """One of STATUSES, for whoever asks: a job that waits in Slurm's queue is pending like all that wait."""
        return PENDING if self.status == SUBMITTED else self.status

    @property
    def current(self) -> Attempt:
        """The present or last attempt; an empty one while it is pending."""
        return self.attempts[-1] if self.attempts and self.status != PENDING else NO_ATTEMPT

    @property
    def attempt(self) -> int:
        """The number of its last start; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def attempt_key(self) -> str:
        """The name of its last attempt, and of no other: ids are given again when a job is forgotten."""
        return f"{self.id}-{self.number}-{self.attempt}"


NO_ATTEMPT = Attempt()


def begin_attempt(job: Job, **facts: Any) -> Job:
    """The job with one more attempt, with a new number.  It replaces a requeued attempt: those would pile up."""
    earlier = job.attempts
    if earlier and earlier[-1].cause == REQUEUED and earlier[-1].pid is None:
        earlier = earlier[:-1]
    return replace(job, attempts=(*earlier, Attempt(**{"number": job.attempt + 1, "log_start": job.log_base, **facts})))


def name_priority(priority: int) -> str:
    if priority == PRIORITIES["normal"]:
        return "normal"
    return "high" if priority < PRIORITIES["normal"] else "low"


def list_shares(job: Job) -> list[int]:
    """A job's share of each of its GPUs, in hundredths, in the order of gpu_indices: `[100, 50]` for 1.5."""
    whole, part = divmod(round(job.gpus * 100), 100)
    return [100] * whole + ([100 if job.exclusive else part] if part else [])


def needs_folder(job: Job) -> bool:
    """Whether its directory must be there before it starts: a snapshot, or code that was sent, brings its own."""
    return not job.snapshot and not job.code


def find_use(job: Job) -> float:
    """What a job counts among its user's GPUs in use: users take turns on CPU slots too."""
    return job.gpus or 0.01


# The pending queue.  Ranks and priorities are strict.  Within a priority, the user with the fewest GPUs in use goes
# first, and among equals the user whose last start is longest ago: a thousand jobs of one do not hold up another's one.
# Of one user, the lowest queue_key goes first, which is the order of submission until a job is moved.

def count_use(state: State) -> dict[str, float]:
    """{user: GPUs in use}"""
    used: dict[str, float] = {}
    for job in state.live.values():
        add_use(used, job)
    return used


def add_use(used: dict[str, float], job: Job) -> None:
    used[job.user] = used.get(job.user, 0.0) + find_use(job)

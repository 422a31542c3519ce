"""config.toml.

Its sections are tables; the rows make the parser, checks, defaults, `nexus config` and the sample file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..opening import TYPE_CHECKING
from .errors import NexusError
from .schema import (
    FLAG,
    NO_NUL,
    NODE_NAME,
    SECONDS,
    SSH_WORD,
    TEXT,
    TEXTS,
    check,
    integer_in,
    list_of,
    matching,
    number_in,
    object_of,
    one_of,
)
from .text import refuse
from .value import Value, field, is_given, optional

if TYPE_CHECKING:
    from typing import Any

    from .job import Amount, Span


class ServiceConfig(Value):
    host: str = optional("127.0.0.1", TEXT, "any other address requires a token on every request")
    port: int = optional(
        6234, integer_in(1, 65535),
        "where it listens; without this line the first free one from here, at the first start", "chosen")
    allowed_hosts: tuple[str, ...] = optional((), TEXTS, "further Host names it may be called by: with a token only")
    refresh_rate_seconds: float = optional(
        5, number_in(0.1, 3600), "GPU polling interval; job exits are noticed at once")
    log_format: str = optional("text", one_of("text", "json"), "or \"json\": one object a line")
    log_level: str = optional("INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR"), "lowest level kept in service.log")
    log_max_mb: float = optional(100, number_in(0.1, 100000), "service.log is rotated at this size")
    log_backups: int = optional(5, integer_in(0, 1000), "rotated logs kept")
    tls_cert: str = optional("", TEXT, "a PEM file, and with tls_key another: https instead of http")
    tls_key: str = optional("", TEXT, "the certificate's private key")
    node_lost_after_seconds: float = optional(0, SECONDS, "jobs fail on a node out of reach for so long; 0 = never")
    public_url: str = optional(
        "", matching(r"^(https?://[^\s/?#\"'<>\\]+(/[^\s?#\"'<>\\]*)?)?$", "an address like https://gpu1.example.org"),
        "the page's address where messages of [hooks] are read, which link there")


PORTS = range(ServiceConfig.port, ServiceConfig.port + 66)      # the first start in a home takes one if none is named


def is_usual(url: str) -> bool:
    """Whether a service has the port that people expect: not one that it took since that was in use."""
    return not any(url.endswith(f":{port}") for port in PORTS[1:])


class StateConfig(Value):
    state_file: str = optional("~/.nexus/state.json", TEXT, "the journal lies beside it; ~/.nexus is NEXUS_HOME")
    log_dir: str = optional("~/.nexus/logs", TEXT, "one folder for each job")
    history_limit: int = optional(
        1000, integer_in(1, 1000000),
        "finished jobs kept, of each user; older ones go, with their logs; those that never ran count apart")


class GpuConfig(Value):
    ids: tuple[int, ...] = optional((), list_of(integer_in(0, 9999)), "GPUs nexus may use, by index; [] = all")
    share_with_others: bool = optional(False, FLAG, "true: a GPU on which a foreign process computes may get a job too")
    ignore_processes: tuple[str, ...] = optional(
        (), TEXTS, "programs whose processes do not count, like [\"Xorg\", \"ollama\"]; their memory still does")
    min_free_mem_mib: int = optional(0, integer_in(0, 100000000), "a GPU with less free memory gets no job")
    max_unseen_mem_mib: int = optional(
        2048, integer_in(0, 100000000), "nor one without jobs, with more in use that no listed process accounts for")
    mem_threshold: float = optional(0.8, number_in(0, 1), "nor one with this fraction of its memory in use by others")
    load_threshold: float = optional(0.8, number_in(0, 1), "nor, for a second job on it, one with this utilization")
    lease_dir: str = optional(
        "", TEXT, "where users' services agree on GPUs; \"\": nexus-leases in /run/lock, or else in /tmp")
    guard_failures: int = optional(
        3, integer_in(0, 1000),
        "a GPU is paused after so many quick failures in a row, while jobs do well on another; 0 = off")
    guard_seconds: float = optional(10, number_in(0, 86400), "quick: within so long of the start")


class JobsConfig(Value):
    launcher: str = optional(
        "screen", one_of("screen", "direct", "slurm"),
        "or \"direct\": no session, no attach; or \"slurm\": see [slurm]")
    default_gpus: int = optional(1, integer_in(0, 1024), "GPUs of a job without --gpus")
    cpu_slots: int = optional(
        0, integer_in(0, 100000), "how many --gpus 0 jobs run at once; 0 = one for each core of the machine")
    max_running: int = optional(0, integer_in(0, 100000), "how many jobs run at once; 0 = as many as fit")
    queue_limit: int = optional(
        10000, integer_in(1, 10000000), "more pending jobs of one user are refused; 5 times as many of all but you")
    timeout_seconds: Span = optional(0, SECONDS, "time limit of a job without --timeout; 0 = none", cause="timeout")
    timeout_multiplier: float = optional(
        2, number_in(1, 1000), "a job with --expect is stopped at this multiple of that time")
    kill_grace_seconds: Span = optional(10, number_in(0, 86400), "from SIGTERM to SIGKILL")
    retries: int = optional(0, integer_in(0, 1000), "further attempts of a failed job that has no --retries")
    retry_backoff_seconds: float = optional(
        5, number_in(0, 86400), "before the first; doubles each time, up to an hour")
    launch_attempts: int = optional(5, integer_in(1, 100), "how often a job is tried that cannot even be launched")
    idle_minutes: float = optional(
        30, number_in(0, 100000), "a job whose GPUs do nothing for so long is shown as idle; 0 = never")
    idle_kill_minutes: Amount = optional(0, number_in(0, 100000), "and stopped after so long; 0 = never", cause="idle")
    on_reboot: str = optional(
        "fail", one_of("fail", "requeue"), "or \"requeue\": what happens to jobs that were running at a reboot")
    reserve_after_seconds: float = optional(300, SECONDS, "a job that waits for so long gets the GPUs that become free")
    preemptible_for_others: bool = optional(
        False, FLAG, "true: after a minute, preemptible jobs give way to waiting jobs of other users' services, too")
    jobs_file: str = optional(
        "", TEXT, "watched: each new line `priority,script,conda_env,arguments,allowed_gpus` becomes a job")
    jobs_file_interval_seconds: float = optional(30, number_in(0.1, 86400), "how often it is read")
    llm_config: str = optional(
        "", TEXT, "JSON: the GPUs of a job with `--llm NAME` in its command, {\"models\": {\"qwen2.5-7b-inst\": 0.5}}")
    cuda_arg: str = optional(
        "replace", one_of("replace", "add"), "--cuda X of a jobs_file row becomes its GPUs; \"add\": in every row")
    allowed_script_paths: tuple[str, ...] = optional(
        (), TEXTS,
        "[] = any; else only `[interpreter] SCRIPT ARGS`, SCRIPT below one of these, where only you or root may write")
    max_memory_gb: Amount = optional(
        0, number_in(0, 1000000), "a job with more host memory is stopped; 0 = any (needs psutil)", cause="host-memory")
    max_running_per_user: int = optional(
        0, integer_in(0, 100000), "how many jobs of one user run at once; 0 = no limit")


LIMITS = {name: row.cause for name, row in JobsConfig.FIELDS.items() if row.cause}      # {key: the cause of an end}


class HooksConfig(Value):
    on_unhealthy: str = optional("", TEXT, "a command, run when `nexus health` turns bad, and again when it is well")
    on_idle: str = optional("", TEXT, "run once for a job that is idle for idle_minutes: NEXUS_JOB_ID, _COMMAND, _GPU")
    on_finish: str = optional(
        "", TEXT, "run at least once for each finished job: NEXUS_JOB_ID, _STATUS, _CAUSE, _EXIT_CODE, _COMMAND, _GPU, "
        "_NAME, _TITLE, _MESSAGE, _MESSAGE_JSON")
    on_group_finish: str = optional(
        "", TEXT, "run once for a group of which nothing has waited or run for 60 s: NEXUS_GROUP, NEXUS_JOB_TITLE, "
        "_MESSAGE, _MESSAGE_JSON")


class SlurmConfig(Value):
    partition: str = optional("", TEXT, "where sbatch puts the jobs; \"\" = the cluster's default, here and below")
    account: str = optional("", TEXT, "who is charged for them")
    qos: str = optional("", TEXT, "their quality of service")
    extra_args: tuple[str, ...] = optional(
        (), list_of(matching("^(?!-[aMW]|--(ar|cl|wr|wait$))", "no --array, --clusters, --wait or --wrap of sbatch")),
        "further options of sbatch, like [\"--constraint=a100\"]; what a job asks for counts more")
    max_submitted: int = optional(
        100, integer_in(1, 100000), "jobs in Slurm's queue at once; the others wait in nexus's")


class NodeConfig(Value):
    """Another machine, as the ssh command gets it: no word may begin with -.  "" and 0: ssh_config decides."""
    name: str = field(NODE_NAME, "what it is called here; its host if not said")
    host: str = field(matching(f"^{SSH_WORD}$", "an address, or a Host of ~/.ssh/config", examples=["10.0.0.5"]),
                      "an address, or a Host of ~/.ssh/config")
    user: str = optional("", matching(f"^({SSH_WORD})?$", "a user's name"), "whose nexus runs there")
    port: int = optional(0, integer_in(0, 65535), "of its sshd")
    jump: str = optional("", matching(f"^({SSH_WORD})?$", "[user@]host[:port]"), "through which it is reached")
    identity_file: str = optional(
        "", matching(f"^([~/]{NO_NUL}*)?$", "an absolute path, or one below ~", **{"x-max-bytes": 4095}),
        "the private key")

    @property
    def destination(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


NODE = object_of(NodeConfig.FIELDS, "a node", required=["host"], examples=[{"host": "10.0.0.5"}])


def section(table: type[Value], name: str) -> Any:
    return optional(table(), object_of(table.FIELDS, f"[{name}]"), name)


class Config(Value):
    service: ServiceConfig = section(ServiceConfig, "service")
    state: StateConfig = section(StateConfig, "state")
    gpu: GpuConfig = section(GpuConfig, "gpu")
    jobs: JobsConfig = section(JobsConfig, "jobs")
    hooks: HooksConfig = section(HooksConfig, "hooks")
    slurm: SlurmConfig = section(SlurmConfig, "slurm")
    nodes: tuple[NodeConfig, ...] = optional((), list_of(NODE), "other machines")
    mock_gpus: int | None = None        # how many GPUs are made up; None: none, the real ones are used


CONFIG = object_of(Config.FIELDS, "config.toml")
SECTIONS: Mapping[str, Any] = {                 # {name: the table's defaults}
    name: row.default for name, row in Config.FIELDS.items() if name != "nodes"}


def parse_config(data: Mapping[str, Any], path: str) -> Config:
    """The configuration of a parsed TOML file.  Raises: usage."""
    if isinstance(data.get("nodes"), list):
        data = {**data, "nodes": list(map(name_node, data["nodes"]))}
    try:
        checked = check(CONFIG, data, "")
        config = Config(**{name: type(table)(**checked.get(name, {})) for name, table in SECTIONS.items()},
                        nodes=tuple(NodeConfig(**node) for node in checked.get("nodes", ())))
        if len({node.name for node in config.nodes}) < len(config.nodes):
            refuse(f"nodes: two have the same name: {', '.join(node.name for node in config.nodes)}", hint="")
        if bool(config.service.tls_cert) != bool(config.service.tls_key):
            refuse("service.tls_cert and service.tls_key belong together: set both, or neither", hint="")
        if config.nodes and config.jobs.launcher == "slurm":
            refuse("jobs.launcher = \"slurm\" and [[nodes]]: Slurm chooses where jobs run; take one out", hint="")
    except NexusError as error:
        hints = [error.hint] if error.hint else []
        raise NexusError("usage", f"{path}: {error.message}",
                         "; ".join([*hints, "all keys and what they mean: nexus config sample"])) from None
    return config


def name_node(node: Any) -> Any:
    """A node's table with a name: its host's, if none is given."""
    return {"name": node["host"], **node} if isinstance(node, dict) and "host" in node else node


def parse_node(data: Any) -> NodeConfig:
    """The body of POST /nodes.  Raises: usage, with all faults at once."""
    return NodeConfig(**check(NODE, name_node(data), ""))


def format_section(name: str, table: Any, before: str = "") -> str:
    """A table of config.toml, each key with its help."""
    facts = {key: json.dumps(getattr(table, key), ensure_ascii=False) for key in table.FIELDS}
    rows = []
    for key, row in table.FIELDS.items():
        mark = "# " if row.chosen and not is_given(table, key) else before
        rows.append(f"{f'{mark}{key} = {facts[key]}':<36} # {row.help}\n")
    return f"\n{before}[{name}]\n" + "".join(rows)


def format_config(config: Config) -> str:
    """The settings in force, in the form of config.toml."""
    return "".join([*(format_section(name, getattr(config, name)) for name in SECTIONS),
                    *(format_section("[nodes]", node) for node in config.nodes)])[1:]


def format_sample_config() -> str:
    """config.toml.example: every key at its default."""
    example = NodeConfig("n1", "10.0.0.5", "gpuuser", 22, "me@gateway", "~/.ssh/id_ed25519")
    return "".join(["# nexus reads this file from ~/.nexus/config.toml (NEXUS_HOME moves it).\n",
                    "# Every key may be left out; these are the defaults.\n",
                    *(format_section(name, table) for name, table in SECTIONS.items()),
                    "\n# Other machines with GPUs, by OpenSSH, whose own configuration, agent and known_hosts apply.  "
                    "Those of\n# `nexus node add` need no lines here.", format_section("[nodes]", example, "# ")])

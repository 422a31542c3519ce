"""Submissions and changes of jobs, checked and completed: by the settings, and by what the machines can run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from ..formats.jobs_file import CUDA_OPTION, LLM_CONFIG, LLM_OPTION
from ..formats.scripts import SHELL_CHARACTERS
from ..hosting.loop import Component
from ..machine.disk import CONFIG_BYTES, Disk, check_directory, read_text
from ..machine.machine import NO_BASH, NO_BASH_HINT
from ..machine.programs import run
from ..opening import TYPE_CHECKING
from ..runner.environment import is_job_variable, list_inherited
from ..schedule.capacity import find_never, is_left_out
from ..schedule.limits import find_limits
from ..schedule.plan import find_slurm_reason
from ..values.errors import NexusError
from ..values.job import Job, needs_folder, round_gpus
from ..values.schema import GPU_PLACE, check
from ..values.state import State, request_class
from ..values.submission import JOB_FIELDS, Asked, check_gpus, check_snapshot, refuse_group_limits
from ..values.text import format_duration, format_line, hash_text, parse_begin, parse_duration, parse_json, refuse, suggest
from ..values.value import replace
from .access import Identity, check_environment, check_priority

if TYPE_CHECKING:
    from typing import Any


def hash_env(env: Mapping[str, str]) -> str:
    return hash_text(json.dumps(env, sort_keys=True))[:16]


SETTINGS = {name: row.setting for name, row in JOB_FIELDS.items() if row.setting}


class Validator(Component):
    """Makes jobs of what users ask for, and refuses those that no machine can ever run."""

    @property
    def defaults(self) -> dict[str, Any]:
        """What the configuration says of a job that does not."""
        return {name: getattr(self.config.jobs, key) for name, key in SETTINGS.items()}

    def make_jobs(self, submissions: Sequence[Asked], user: str) -> list[tuple[Job, Mapping[str, str], Asked]]:
        """A job for each submission, without place and id, with its environment.  Raises: usage, forbidden."""
        environments: dict[object, tuple[str, Mapping[str, str]]] = {}          # many jobs share one
        checked = []
        for asked in submissions:
            source = id(asked.environment), id(asked.env)
            if source not in environments:
                base = self.environ if asked.environment is None else asked.environment
                environments[source] = self.make_environment(base, asked.env)
            digest, variables = environments[source]
            checked.append((self.make_job(asked, user, digest), variables, asked))
        jobs = [job for job, _, _ in checked]
        self.check_bash()
        self.check_folders(jobs)
        self.check_ever_run(jobs)
        self.check_commands(jobs)
        return checked

    def make_job(self, asked: Asked, user: str, digest: str) -> Job:
        config, fields = self.config.jobs, asked.job
        if asked.llm:
            self.check_llm(asked.llm)
        defaults = {"id": "", **self.defaults, "cwd": self.service.scripts.find_folder(fields["command"])}
        named = re.search(LLM_OPTION, fields["command"])
        model = asked.llm or (named and named[1])
        if config.llm_config and model and "gpus" not in fields:
            defaults["gpus"] = find_llm_share(self.disk, config.llm_config, model)
        env_digest = hash_env(asked.env) if asked.env else None
        job = Job(**{**defaults, **fields}, user=user, created_at=0.0, queue_key=(), environment=digest,
                  env_digest=env_digest, env_names=tuple(asked.env), **self.find_conditions(vars(asked)))
        self.check_job(job)
        return job

    def find_conditions(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of Job for what `asked` has of these: when it may begin, and where.  Raises: usage."""
        fields: dict[str, Any] = {}
        if "begin" in asked:
            fields["begin_at"] = asked["begin"] and parse_begin(asked["begin"], self.clock.now())
        if "node" in asked:
            machines, node = [self.service.node, *self.service.pool.nodes], asked["node"]
            if node is not None and node not in machines:
                refuse(f"there is no node {node}", suggest(node, machines) or "nexus node list")
            fields["only_node"] = "" if node == self.service.node else node
        if "after_pid" in asked:
            waited = self.machine.processes.find(asked["after_pid"]) if asked["after_pid"] else None
            if asked["after_pid"] and not waited:
                refuse(f"there is no process {asked['after_pid']} on {self.service.node}, or it cannot be seen",
                       hint="it has ended? then leave --after-pid out")
            fields["after_process"] = (waited.pid, waited.started, self.machine.boot_id) if waited else None
        return fields

    def check_llm(self, model: str) -> None:
        """Raises: usage."""
        if not self.config.jobs.llm_config:
            refuse(f"llm {format_line(model, 40)}: [jobs] llm_config is not set",
                   "set [jobs] llm_config in config.toml")

    def check_job(self, job: Job) -> None:
        """Raises: usage, forbidden."""
        check_gpus(job)
        if re.fullmatch(GPU_PLACE, job.name or ""):
            refuse(f"the name {job.name} would be taken for a GPU", hint="begin it with a letter, like --name run-1; "
                   "if it is Slurm's -n, the number of tasks: leave it out")
        limit_s = find_limits(job, self.config.jobs).timeout_seconds
        if job.warn and limit_s <= parse_duration(job.warn.partition("@")[2]):
            refuse(f"warn {job.warn} needs a longer time limit, and this job "
                   f"{'is stopped after ' + format_duration(limit_s) if limit_s else 'has none'}",
                   hint="set one: --timeout TIME")
        if job.cuda_arg and not re.search(CUDA_OPTION, job.command) and re.search(SHELL_CHARACTERS, job.command):
            refuse("cuda_arg: cannot tell where --cuda belongs in this command",
                   hint="write it there: python train.py --cuda 0 | tee log")
        self.service.scripts.find_script(job)

    def check_folders(self, jobs: Iterable[Job]) -> None:
        """Raises: usage, when the directory of a job is not there that can only run on this machine."""
        if self.service.is_slurm:               # its machines are not known
            return
        here = [""] if self.service.pool.nodes else ["", None]
        bound = [job.cwd for job in jobs if needs_folder(job) and job.only_node in here]
        for folder in dict.fromkeys(bound):
            check_directory(self.disk, "cwd", folder)

    def check_bash(self) -> None:
        """Raises: unavailable, where no job can start.  Of other machines that is not known."""
        is_alone = not self.service.is_slurm and not self.service.pool.nodes
        if is_alone and not self.service.machine.has_bash():
            raise NexusError("unavailable", NO_BASH, NO_BASH_HINT)

    def check_commands(self, jobs: Iterable[Job]) -> None:
        """Raises: usage, for a command that is cut off in quotes."""
        if self.config.jobs.allowed_script_paths:           # check_job() has read them all
            return
        commands = dict.fromkeys(job.command for job in jobs)
        unclear = [command for command in commands if command.count('"') % 2 or command.count("'") % 2]
        for command in unclear[:MAX_PARSED]:                # bash decides: it may be valid, for example in a comment
            check_command(command)

    def make_change(self, jobs: Iterable[Job], change: Mapping[str, Any], caller: Identity) -> dict[str, Any]:
        """The fields of Job for a `change` (None: the default), checked for each job.  Raises: usage, forbidden."""
        check_priority(change.get("priority"), caller)
        check_environment(change.get("environment"), caller, self.service.user)
        drafted = {name: self.defaults.get(name, JOB_FIELDS[name].default) if value is None else value
                   for name, value in change.items() if name in JOB_FIELDS and name != "environment"}
        drafted.update(self.find_conditions(change))
        if "snapshot" in drafted:
            drafted.setdefault("snapshot_repo", None)
        if "command" in drafted:                # another may not have these values
            drafted["sweep_values"] = drafted["template"] = ()
        if change.get("llm"):
            self.check_llm(change["llm"])
            share = find_llm_share(self.disk, self.config.jobs.llm_config, change["llm"])
            drafted.setdefault("gpus", share)
        changed = [replace(job, **drafted) for job in jobs] if change else []
        self.check_changed(changed, change, drafted)
        return drafted

    def check_changed(self, changed: Collection[Job], change: Mapping[str, Any], drafted: Container[str]) -> None:
        """Check jobs as they are with a `change`, which has `drafted` these fields.  Raises: usage, forbidden."""
        for job in {self.find_checked(job): job for job in changed}.values():
            self.check_job(job)
            if not job.group:
                refuse_group_limits(change)
            if "cwd" in drafted or "snapshot" in drafted:
                if job.code:
                    refuse("the job's script came with it, and runs in a folder of its own")
                check_snapshot(job.snapshot, job.snapshot_repo, job.cwd)
        if any(name in drafted for name in ("cwd", "snapshot", "only_node")):
            self.check_folders(changed)
        self.check_ever_run(changed)
        self.check_commands(changed)

    def find_checked(self, job: Job) -> tuple[Any, ...]:
        """All of a job that decides whether make_change() refuses it."""
        return (request_class(job), job.command, job.cwd, job.user, job.name, job.group, job.warn, job.timeout_seconds,
                job.expected_time, job.conda, job.code, job.snapshot, job.snapshot_repo)

    def change_env(self, state: State, job: Job,
                   change: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str] | None]:
        """(the fields of a job with a change's `env` or `environment`, its environment then); ({}, None) without them.

        In another environment it has its own variables as before.  Raises: usage.
        """
        env, base = change.get("env") or {}, state.environments.get(job.environment, {})
        if "environment" in change:
            if job.env_digest and not job.env_names and not env:
                refuse(f"job {job.id} was given variables in an older nexus, which did not keep their names",
                       hint="give them again beside --this-env: --env NAME=VALUE")
            base = {**change["environment"], **{name: base[name] for name in job.env_names if name in base}}
        elif not env:
            return {}, None
        digest, variables = self.make_environment(base, env)
        facts: dict[str, Any] = {"environment": digest, "env_names": tuple(dict.fromkeys((*job.env_names, *env)))}
        if env:
            facts["variables"] = tuple(pair for pair in job.variables if pair[0] not in env)
            facts["env_digest"] = hash_env({**env, "": job.env_digest} if job.env_digest else env)
        return facts, variables

    def check_ever_run(self, jobs: Collection[Job]) -> None:
        """Raises: usage, when no machine can ever run one of these jobs."""
        if not self.service.is_slurm and any(job.gpus for job in jobs):
            self.service.gpu_watch.first_probe.wait(2.0)
        for job in {request_class(job): job for job in jobs}.values():      # once for all jobs with the same request
            self.check_ever_runs(job)

    def check_ever_runs(self, job: Job) -> None:
        """Raises: usage, when no machine can ever run the job.  A job passes while a machine's GPUs are unknown."""
        if self.service.is_slurm and (reason := find_slurm_reason(job)):
            refuse(f"the job {reason.detail}", "[jobs] launcher is \"slurm\"; the kind of GPU is chosen by "
                   "--gpu-type, or by [slurm] partition and extra_args")
        if self.service.is_slurm or not job.gpus:
            return
        own = tuple(gpu for gpu in self.service.observer.observation.gpus if not is_left_out(gpu, self.config.gpu))
        machines = {"": own, **{name: node.reports.gpus for name, node in self.service.pool.nodes.items()}}
        machines = {name: gpus for name, gpus in machines.items() if job.only_node in (None, name)}
        if any(not gpus if name else self.service.observer.observation.error for name, gpus in machines.items()):
            return                              # the GPUs of one machine are unknown now
        if never := find_never(job, machines):
            refuse(f"the job {never.detail}",
                   NEVER_HINTS[never.subject] + self.service.gpu_watch.describe_limit("; the service "))

    def make_environment(self, base: Mapping[str, str], added: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """Return (digest, variables) of an environment with further variables.  Raises: usage."""
        own = {name: text for name, text in added.items() if not is_job_variable(name)}
        variables = {**list_inherited(base), **own}
        text = json.dumps(variables, sort_keys=True)
        if len(text) > 1024 * 1024:
            refuse("the environment is larger than 1 MiB", hint="unset what the job does not need")
        return hash_text(text)[:32], variables


def find_llm_share(disk: Disk, path: str, model: str) -> float:
    """Return the GPUs for a job of `model` (llm_config.json).  Raises: usage, when the file is wrong; unavailable."""
    path = os.path.abspath(os.path.expanduser(path))
    text = read_text(disk, path, CONFIG_BYTES)
    if text is None:
        refuse(f"llm_config {path} is not there", "nexus config edit")
    try:
        found = check(LLM_CONFIG, parse_json(text, "this file"), "")
    except NexusError as error:
        example = '{"default_requirement": 1.0, "models": {"qwen2.5-7b-inst": 0.5}}'
        raise NexusError("usage", f"{path}: {error.message}", example) from None
    return round_gpus(found.get("models", {}).get(model, found.get("default_requirement", 1)))


NEVER_HINTS = {"gpus": "ask for fewer; --gpus 0 runs a job without one", "gpu_ids": "nexus shows them",
               "gpu_type": "a part of a GPU's name will do, as nexus shows it",
               "gpu_mem_mib": "ask for less: it must be free on each of the GPUs"}
MAX_PARSED = 100                # commands of one request that bash is asked about: it takes milliseconds for each


def check_command(command: str) -> None:
    """Raises: usage, if bash cannot read it."""
    done = run(["bash", "-p", "-n", "-c", "--", command], 5)
    if done.exit_code:
        error = re.sub(r"^bash: (-c: )?(line [0-9]+: )?", "", done.output.strip().split("\n")[0])
        refuse(f"bash cannot read the command: {format_line(error, 200)}",
               "close each quote; to try it: bash -n -c …")

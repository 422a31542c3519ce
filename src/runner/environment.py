"""The environment of a job, here and on a node."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from ..formats.jobs_file import fill_cuda_option
from ..values.gpu import Gpu
from ..values.job import Job
from ..values.value import replace


def build_environment(job: Job, variables: Mapping[str, str], gpus: Sequence[Gpu], port: int) -> dict[str, str]:
    """The submitter's environment, and nexus's variables over it.

    A job with --cuda sees all GPUs, unless there are MIG slices.  `port`: for torch.distributed, unless it has one.
    """
    is_cut = has_slices(gpus)
    devices = job.current.gpu_uuids if is_cut else map(str, list_cuda_numbers(job, gpus))
    own = {"NEXUS_JOB_PORT": str(port), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(devices),
           "NEXUS_JOB_ID": job.id, "NEXUS_JOB_NONCE": job.current.nonce or "",
           "NEXUS_GPU_ID": ",".join(job.current.gpu_places)}
    is_slurm = job.current.slurm_key is not None        # job.sh learns its GPUs where it runs
    sees_all = is_slurm or (job.cuda_arg and not is_cut)
    unset = {*(["CUDA_VISIBLE_DEVICES"] if sees_all else []), *(["NEXUS_GPU_ID"] if is_slurm else [])}
    passed = {name: text for name, text in variables.items() if name not in own and not is_job_variable(name)
              and not (is_slurm and name.startswith("SLURM_")) and (text or name not in PORT_VARIABLES)}
    passed.update(job.variables)
    port_text = passed.get("MASTER_PORT") or passed.get("PET_MASTER_PORT") or str(port)
    kept = {"SHLVL": "0", "PYTHONUNBUFFERED": "1", **dict.fromkeys(PORT_VARIABLES, port_text), **passed}
    return {**kept, **{name: text for name, text in own.items() if name not in unset}}


def find_python_env(variables: Mapping[str, str]) -> str | None:
    """`venv /home/ann/exp/.venv`, `conda ml`: the environment that is active, the first on PATH; None: none is."""
    path = variables.get("PATH", "").split(":")
    venv, conda = variables.get("VIRTUAL_ENV", ""), variables.get("CONDA_PREFIX", "")
    envs = {f"{venv}/bin": f"venv {venv}", f"{conda}/bin": f"conda {variables.get('CONDA_DEFAULT_ENV') or conda}"}
    return next((envs[folder] for folder in path if folder in envs and folder != "/bin"), None)


PORT_VARIABLES = ("MASTER_PORT", "PET_MASTER_PORT")         # of torch.distributed, and what torchrun makes that of


def is_port_of_nexus(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a variable has the port that nexus chose for the job in which this is: only that job may listen there."""
    port = environ.get(name)
    # A job that an older nexus has started has no NEXUS_JOB_PORT.
    return name in PORT_VARIABLES and "NEXUS_JOB_ID" in environ and environ.get("NEXUS_JOB_PORT", port) == port


def has_slices(gpus: Iterable[Gpu]) -> bool:
    """Whether jobs get their GPUs by UUID: no number reaches a MIG slice, and beside slices CUDA counts no cards."""
    return any(gpu.is_mig for gpu in gpus)


def list_cuda_numbers(job: Job, gpus: Sequence[Gpu]) -> list[int]:
    """The numbers that CUDA gives a job's GPUs: under PCI_BUS_ID, their ranks among those that it may open.

    A card without a row in nvidia-smi may not be opened, and one with a fault cannot be.
    """
    if has_slices(gpus):
        return list(range(len(job.current.gpu_indices)))
    usable = sorted(gpu.index for gpu in gpus if not gpu.fault)
    return [usable.index(index) if index in usable else index for index in job.current.gpu_indices]


def fill_cuda_numbers(job: Job, gpus: Sequence[Gpu]) -> Job:
    """The job with its GPUs' numbers in its command, if it has cuda_arg."""
    return replace(job, command=fill_cuda_option(job.command, list_cuda_numbers(job, gpus))) if job.cuda_arg else job


# By these a CI system finds what a job of its own has left, to kill it: those of GitHub and Azure, and Jenkins, which
# kills only what has all that it looks for: so BUILD_ID stays.
CI_MARKS = ("RUNNER_TRACKING_ID", "VSTS_PROCESS_LOOKUP_ID", "JENKINS_NODE_COOKIE", "JENKINS_SERVER_COOKIE",
            "HUDSON_SERVER_COOKIE", "HUDSON_COOKIE")


@functools.lru_cache(1024)
def is_job_variable(name: str) -> bool:
    """Whether a variable is one job's alone, of nexus's or of CI: jobs and services that it starts do not get it."""
    return name.startswith(("NEXUS_JOB_", "NEXUS_SWEEP_")) or name in CI_MARKS or name in (
        "NEXUS_GPU_ID", "NEXUS_TASK_ID", "NEXUS_ROLE", "NEXUS_UMASK", "NEXUS_FORMER_PYTHON", "NEXUS_HAS_RUN",
        "NEXUS_CHANGED", "STY", "WINDOW")


def list_inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not those of the job in which this is: jobs and services that start here get them."""
    return {name: text for name, text in environ.items()
            if not is_job_variable(name) and not is_port_of_nexus(name, environ)}


def find_visible_devices(environ: Mapping[str, str]) -> str | None:
    """The CUDA_VISIBLE_DEVICES that a service started here gets; inside a job, it is the job's."""
    return None if "NEXUS_JOB_ID" in environ else environ.get("CUDA_VISIBLE_DEVICES")

# The variables that a job on a node takes from the node, not from its submitter
OWN_VARIABLES = (
    r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TMPDIR|TMP|TEMP|MAIL|HOSTNAME|DISPLAY|XAUTHORITY|WAYLAND_DISPLAY|"
    r"PATH|(XDG|SSH|DBUS|SYSTEMD|NEXUS|SLURM|TMUX|SCREEN)_?\w*|INVOCATION_ID|JOURNAL_STREAM|CUDA_VISIBLE_DEVICES")


def mix_environments(variables: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The submitter's environment, but for what describes a machine: that is the node's own."""
    paths = [*variables.get("PATH", "").split(":"), *(own.get("PATH") or os.defpath).split(":")]
    return {**{name: text for name, text in own.items() if re.fullmatch(OWN_VARIABLES, name)},
            **{name: text for name, text in variables.items() if not re.fullmatch(OWN_VARIABLES, name)},
            "PATH": ":".join(dict.fromkeys(filter(None, paths)))}

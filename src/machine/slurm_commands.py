"""Slurm's programs: sbatch, squeue, scancel and sinfo."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ..formats.slurm import (
    SBATCH_ANSWER,
    SQUEUE_FORMAT,
    SlurmJob,
    SlurmPartition,
    clean_slurm_words,
    parse_slurm_jobs,
    parse_slurm_partitions,
    read_refusal,
)
from ..values.errors import NexusError
from .programs import Completed, run

SLURM_TIMEOUT_S = 60.0          # without slurmctld or munged, Slurm's programs try for up to 50 s
SLURM_VARIABLES = r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|KRB5\w+|SLURM_CONF|SBATCH_(?!CLUSTERS$|ARRAY_INX$|WAIT$)\w+"


class Slurm:
    """Runs Slurm's programs."""

    def __init__(self, service_id: str, environ: Mapping[str, str]) -> None:
        """Jobs get sbatch's environment: it holds no secrets.  --export=NONE would run each user's login shell."""
        self.service_id = service_id
        kept = {name: text for name, text in environ.items() if re.fullmatch(SLURM_VARIABLES, name)}
        self.environ = {**kept, "TZ": "UTC"}

    def ask(self, *argv: str) -> tuple[Completed, str]:
        """(a program's result, its output as a message).  Raises: unavailable, with Slurm's own words."""
        install = "run nexus where sbatch works (apt install slurm-client), or set [jobs] launcher (nexus config edit)"
        try:
            done = run(argv, SLURM_TIMEOUT_S, self.environ, install=install)
        except NexusError as error:
            raise error if error.hint == install else fail_slurm(error.message) from None
        return done, clean_slurm_words(done.output) or f"{argv[0]} ended with exit code {done.exit_code}"

    def read(self, *argv: str) -> str:
        """The output of a program that must succeed.  Raises: unavailable."""
        done, words = self.ask(*argv)
        # squeue, when the user's name cannot be looked up, shows no job, and its exit code is 0.
        if done.exit_code or re.search("(?m)^squeue: error: Invalid user", done.output):
            raise fail_slurm(words)
        return done.output

    def run_sbatch(self, argv: Sequence[str]) -> tuple[str | None, str]:
        """(the job's id or None, Slurm's words).  Raises: unavailable; Slurm may have the job all the same."""
        done, words = self.ask(*argv)
        match = re.search(SBATCH_ANSWER, done.output)
        if match and not done.exit_code:
            return match[1], ""
        if done.exit_code <= 0 or read_refusal(words)[0] == "cluster":
            raise fail_slurm(words)
        return None, words

    def query_jobs(self) -> list[SlurmJob]:
        """All jobs of this user that slurmctld knows, ended ones for its MinJobAge.  Raises: unavailable."""
        text = self.read("squeue", "-h", "-a", "-t", "all", "-u", str(os.geteuid()), "-o", SQUEUE_FORMAT)
        return parse_slurm_jobs(text, self.service_id)

    def cancel(self, ids: Sequence[str]) -> str:
        """Slurm's words when it refuses.  Raises: unavailable."""
        done, words = self.ask("scancel", *ids)
        return words if done.exit_code else ""

    def query_partitions(self) -> tuple[SlurmPartition, ...]:
        """Raises: unavailable."""
        return parse_slurm_partitions(
            self.read("scontrol", "show", "partition", "-o"), self.read("scontrol", "show", "node", "-d", "-o"))

    def query_name(self) -> str:
        """The cluster's name.  Raises: unavailable."""
        match = re.search(r"^ClusterName\s*=\s*(\S+)", self.read("scontrol", "show", "config"), re.MULTILINE)
        return match[1] if match else "?"


def fail_slurm(words: str) -> NexusError:
    return NexusError("unavailable", f"Slurm does not answer: {words}",
                      hint=read_refusal(words)[1] or "nexus goes on when it does; see: scontrol ping")

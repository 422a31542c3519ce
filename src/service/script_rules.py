"""allowed_script_paths: which scripts users may run, where, and with which variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from shlex import quote

from ..formats.scripts import parse_script
from ..hosting.loop import Component
from ..machine.log_reader import read_part
from ..values.errors import NexusError
from ..values.job import Job
from ..values.text import format_line
from ..values.value import replace
from .access import Identity


class ScriptRules(Component):
    """Enforces allowed_script_paths: a job is a script below one of these folders, with the owner's variables."""

    def is_bound(self, job: Job) -> bool:
        """Whether the rules hold for a job's environment and directory: not for the owner's."""
        return bool(self.config.jobs.allowed_script_paths) and job.user != self.service.user

    def check_path(self, path: str) -> None:
        """Raises: forbidden, when a real path is not in an allowed folder, or where users' files lie."""
        allowed = [os.path.realpath(os.path.expanduser(folder)) for folder in self.config.jobs.allowed_script_paths]
        own = list(map(os.path.realpath, (self.layout.home, self.layout.log_dir, self.layout.code_folder)))
        above = [folder for folder in (*own, *allowed) if f"{path}/".startswith(folder.rstrip("/") + "/")]
        fault = ""
        if not set(allowed).intersection(above):
            fault = f"not below {' or '.join(allowed)}"
        elif max(above, key=len) in own:
            fault = "in a folder of nexus"
        if fault:
            raise NexusError("forbidden", f"{format_line(path, 200)} may not be used here: it is {fault}",
                             "[jobs] allowed_script_paths says what may; the job's directory must be there too")

    def find_folder(self, command: str) -> str:
        """Where a job runs that does not say: at home; if it must be a script, beside that.  Raises: forbidden."""
        script = parse_script(command)[1] if self.config.jobs.allowed_script_paths else ""
        return os.path.dirname(script) if script.startswith("/") else os.path.expanduser("~")

    def find_script(self, job: Job) -> tuple[str, list[str]]:
        """(interpreter or "", [resolved script, *arguments]); ("", []) if all may run.  Raises: forbidden."""
        if not self.config.jobs.allowed_script_paths:
            return "", []
        what = next((name for name in ("conda", "snapshot", "code") if getattr(job, name)), "")
        if what:
            raise NexusError("forbidden", f"{what} may not be given: only some scripts may run here",
                             "[jobs] allowed_script_paths says which")
        interpreter, script, arguments = parse_script(job.command)
        path = os.path.realpath(os.path.join(job.cwd, script))
        self.check_path(path)
        if self.is_bound(job):          # a version manager runs what a file in the directory says
            self.check_path(os.path.realpath(job.cwd))
        return interpreter, [path, *arguments]

    def check_env(self, env: object, caller: Identity) -> None:
        """Raises: forbidden."""
        if env and self.config.jobs.allowed_script_paths and not caller.is_owner:
            raise NexusError("forbidden", "env may not be given: only some scripts may run here",
                             "give it as an argument: python train.py --seed 1")

    def restrain(self, job: Job, variables: Mapping[str, str]) -> tuple[Job, Mapping[str, str]]:
        """A job, and its variables, as allowed_script_paths permits at its start.  Raises: forbidden.

        All words are quoted: the shell only executes them.  A user's umask could let others change the files that a
        script writes (such as .pyc).  The real directory: a link may lead elsewhere by now.
        """
        interpreter, words = self.find_script(job)
        if words:
            if not os.path.isfile(words[0]):
                raise NexusError("forbidden", f"{words[0]} is not a file")
            head = read_part(self.disk, words[0], 0, 256)
            if not interpreter and not re.match(rb"\x7fELF|#![ \t]*/", head):     # bash runs it
                raise NexusError("forbidden", f"{words[0]} cannot be run by itself: it does not begin with #!/",
                                 hint="give it a first line like #!/bin/sh, and chmod +x; or name its interpreter")
            job = replace(job, command=" ".join(map(quote, [*filter(None, [interpreter]), *words])))
        if not self.is_bound(job):
            return job, variables
        bound = replace(job, umask=self.service.umask | 0o022, cwd=os.path.realpath(job.cwd), variables=())
        return bound, self.environ

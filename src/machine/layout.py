"""The layout of ~/.nexus: where each file and folder is."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..values.config import Config
from ..values.job import Job
from ..values.text import refuse
from .disk import Disk, check_owner

HISTORY_ENDING = ".means"


class Layout:
    """The paths of all files."""

    def __init__(self, home: str, state_file: str, log_dir: str) -> None:
        self.home, self.state_file, self.log_dir = home, state_file, log_dir
        self.config_file = os.path.join(home, "config.toml")
        self.choice_file = os.path.join(home, "config.path")            # the path of the last --config
        self.port_file = os.path.join(home, "port")                     # that of the first start, which chose it
        self.moved_file = os.path.join(home, "port.moved")              # since when it is another one, and which it was
        self.programs_file = os.path.join(home, "programs.json")        # {program: the folder where a service found it}
        self.service_file = os.path.join(home, "service.json")
        self.cache_dir = os.path.join(home, "cache")
        self.start_error_file = os.path.join(home, "start_error.json")
        self.token_file = os.path.join(home, "token")
        self.tokens_file = os.path.join(home, "tokens.json")            # other users' tokens
        self.lock_file = os.path.join(home, "lock")
        self.stopped_file = os.path.join(home, "stopped")               # exists after nexus stop
        self.events_file = os.path.join(home, "events")
        self.socket_file = os.path.join(home, "api.sock")
        self.offer_file = os.path.join(home, "offer.sock")              # exists during nexus restart
        self.service_log = os.path.join(home, "service.log")
        self.screen_rc = os.path.join(home, "screenrc")
        self.supervisor_script = os.path.join(home, "supervisor.sh")
        self.journal_dir = os.path.dirname(state_file)
        self.journal_file = os.path.join(self.journal_dir, "journal.jsonl")
        self.code_folder = os.path.join(self.journal_dir, "submitted-code")
        self.turns_file = os.path.join(home, "turns.json")              # what users of this box had of its GPUs lately
        self.history_dir = os.path.join(self.journal_dir, "history")    # of the GPUs
        self.runs_file = os.path.join(self.history_dir, "runs.jsonl")   # what ran on them in the last days

    def copy_of(self, digest: object, kind: str) -> str:
        """The copy of a file that a service was started with: its nexus.py, or its configuration."""
        return os.path.join(self.cache_dir, f"nexus-{digest}{kind}")

    def code_file(self, name: str) -> str:
        return os.path.join(self.code_folder, f"{name}.py")

    def history_file(self, uuid: str) -> str:
        return os.path.join(self.history_dir, f"{uuid.replace('/', '%2F')}{HISTORY_ENDING}")

    def job_folder(self, job_id: str) -> str:
        return os.path.join(self.log_dir, f"job_{job_id}")

    def folder_of(self, job: Job) -> str:
        """The folder of a job's logs, whether it exists yet or not.  log_dir may have changed since its start."""
        return job.log_dir or self.job_folder(job.id)

    def work_folder(self, job_id: str) -> str:
        return os.path.join(self.job_folder(job_id), "work")        # cwd of a job with an uploaded script


def find_home(disk: Disk, environ: Mapping[str, str]) -> str:
    """~/.nexus, or NEXUS_HOME.  Raises: usage, when nobody knows ~; forbidden, when another user owns it."""
    home = os.path.abspath(expand_user(environ.get("NEXUS_HOME") or os.path.join(environ.get("HOME") or "~", ".nexus")))
    check_owner(disk, home, "NEXUS_HOME")
    return home


def expand_user(path: str) -> str:
    """expanduser(), but for what it leaves as it is: a folder of the name ~ in whatever directory is nobody's home."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        refuse(f"no home directory is known for {path}: HOME is not set, or there is no such user (you are uid "
               f"{os.geteuid()})", hint="export HOME=/a/folder/of/yours, or NEXUS_HOME")
    return expanded


def make_layout(home: str, config: Config) -> Layout:
    """Default paths follow NEXUS_HOME."""
    return Layout(home, *(
        os.path.abspath(os.path.expanduser(home + path[len("~/.nexus"):] if path.startswith("~/.nexus/") else path))
        for path in (config.state.state_file, config.state.log_dir)))


def hash_code(content: bytes) -> str:
    """A short hash of a nexus.py: 8 hex digits of its SHA-256."""
    import hashlib
    return hashlib.sha256(content).hexdigest()[:8]

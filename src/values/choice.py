"""What chooses jobs for a list or a change, and what a change may hold."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from shlex import quote

from ..opening import TYPE_CHECKING
from .job import DURATION_TEXT, FINAL, MAX_JOBS, STATUS, STATUSES, Job
from .schema import FLAG, LINE, MAX_NAME, NAMED, STRING, TEXT, integer_in, list_of, matching, object_of, one_of, read_object
from .submission import ASKED
from .sweep import MAX_SWEEP, MAX_SWEEP_BYTES
from .text import format_line, parse_duration
from .value import Field, Value, optional

if TYPE_CHECKING:
    from typing import Any

    from ..opening import Schema

MAX_STATUSES = 20               # that a request names
MAX_SOUGHT = 4096               # characters of a text that is looked for


class Choice(Value):
    """Which jobs: those in `ids`, or else all that match the other fields, which are filters.

    A row here and a line in make_test() are a filter wherever jobs are chosen: in the parameters of lists, in bodies,
    and, with a `flag`, in commands.  `public`: it looks at what all users may see of a job.
    """
    ids: Sequence[str] = optional((), list_of(NAMED, 1, MAX_JOBS), "these jobs")
    status: Sequence[str] = optional(
        (), list_of(STATUS, most=MAX_STATUSES), "jobs of this status; several: status=failed,cancelled", "public",
        flag="--status S,S",
        option=f"of these statuses: {', '.join(STATUSES)}",
        text=matching(f"^(?i:({'|'.join(STATUSES)})(,({'|'.join(STATUSES)}))*)$",
                      f"some of {', '.join(STATUSES)}, with commas between", maxLength=MAX_NAME),
        parse=lambda text: text.lower().split(","))
    user: str | None = optional(
        None, NAMED, "jobs of this user alone", "public", flag="--user", option="the jobs of this user", told="of")
    group: str | None = optional(
        None, NAMED, "only this group's; empty: of no group", flag="--group G", option="the jobs of this group",
        told="of group")
    name: str | None = optional(
        None, NAMED, "only those whose name fits this pattern of a shell, like lr=0.1*; empty: without a name",
        flag="--name PATTERN", option="the jobs whose name fits this pattern, like 'lr=0.1*'", told="named")
    since: str | None = optional(
        None, DURATION_TEXT, "only those that ended in the last 24h (7d), or else were added in it", "public",
        flag="--since TIME", like="24h",
        option="the jobs that ended, or else were added, in the last 24h or 7d, or since yesterday or 2024-10-24",
        told="of the last")
    older: str | None = optional(
        None, DURATION_TEXT, "only those that ended more than 30d ago, or else were added so long ago", "public",
        flag="--older TIME", like="30d",
        option="the jobs that ended, or else were added, more than 30d ago, or before 2024-10-24", told="older than")
    text: str | None = optional(
        None, {**STRING, "maxLength": MAX_SOUGHT},
        "only jobs with this text in their id, name, command, user, group, directory, machine, or cause",
        flag="--text", option="the jobs with this text in their name, command, group, directory, machine or cause",
        told="with the text")

    def make_test(self, now: float) -> Callable[[Job], bool]:
        """Make what tells whether a job matches, with the texts parsed once; its caller has checked ids and status."""
        import fnmatch
        since = None if self.since is None else now - parse_duration(self.since)
        until = None if self.older is None else now - parse_duration(self.older)
        text, name_fits = (self.text or "").lower(), re.compile(fnmatch.translate(self.name or "")).match

        def fits(job: Job) -> bool:
            return (self.user in (None, job.user)
                    and self.group in (None, job.group or "")
                    and (self.name in (None, job.name or "") or name_fits(job.name or "") is not None)
                    and (since is None or find_latest(job) >= since)
                    and (until is None or find_latest(job) < until)
                    and (not text or text in join_texts(job).lower()))

        return fits

    def select(self, jobs: Iterable[Job], may_see: Callable[[str], bool], now: float) -> list[Job]:
        """The jobs that match.  A choice by what is not public would reveal it of jobs of others."""
        is_public, fits = all(self.FIELDS[name].public for name in self.given), self.make_test(now)
        return [job for job in jobs if (is_public or may_see(job.user)) and fits(job)]

    @property
    def given(self) -> list[str]:
        """The fields that restrict it; none: it is all jobs."""
        return [name for name, row in self.FIELDS.items() if getattr(self, name) != row.default]


FILTERS = {name: row for name, row in Choice.FIELDS.items() if name != "ids"}


def is_pattern(text: str) -> bool:
    return re.search(r"[*?]|\[.+]", text) is not None


def find_latest(job: Job) -> float:
    """When a job ended, or else was added."""
    return job.status_history[-1][1] if job.status in FINAL else job.created_at


def join_texts(job: Job) -> str:
    """What Choice.text looks for in a job, a line each."""
    last = job.current
    texts = (job.id, job.name, job.command, job.user, job.group, job.cwd, last.node, last.slurm_node, last.cause,
             last.cause_line)
    return "\n".join(filter(None, texts))


def describe_filters(filters: Mapping[str, Any], mark: Callable[[str], str] = quote) -> str:
    """What jobs are chosen by, beside their status, for a message: ` of group g named x`; "" for all."""
    texts = {name: fact if isinstance(fact, str) else ",".join(fact) for name, fact in filters.items()}
    return "".join(f" {row.told} {mark(format_line(texts[name], 60))}" for name, row in FILTERS.items()
                   if row.told and name in texts)


CHOICE_KEYS = {                                 # of bodies: what is chosen is changed
    **Choice.FIELDS,
    "status": Field(list_of(STATUS, 1, MAX_STATUSES), "jobs of these statuses; beside `ids`, what those must be",
                    default=None, text=STATUS, parse=lambda text: (text,)),
    # An empty text would be in all jobs
    "text": Field(matching("[\\s\\S]", "a text that is not empty", maxLength=MAX_SOUGHT), FILTERS["text"].help,
                  default=None)}
CHOICE = object_of(CHOICE_KEYS, "which jobs", minProperties=1,
                   examples=[{"ids": ["abc", "abd"]}, {"group": "sweep", "status": "failed"}])
CANCEL_KEYS = {**CHOICE_KEYS, "signal": Field(
    one_of("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"),
    "what running ones get first, instead of TERM; KILL follows as ever", default=None, like="INT")}
CANCEL = object_of(CANCEL_KEYS, "which jobs", minProperties=1, examples=CHOICE["examples"])
# What `edit` may change of a pending job, and `retry` of a finished one: what `add` takes.
CHANGES = {name: row for name, row in ASKED.items()
           if (row.flag and name not in ("unique", "unless_active")) or name in (
               "command", "snapshot", "snapshot_repo", "environment", "umask")}
CLEARED = CHANGES.keys() - {"command", "cwd", "env", "environment", "llm"}     # of these, null takes away what was set
LIVE_CHANGES = {name: row for name, row in CHANGES.items() if row.live}        # of a running one
LIVE_IN_SLURM = {name for name, row in CHANGES.items() if row.live_in_slurm}
LIVE_FLAGS = ", ".join(row.flag for row in LIVE_CHANGES.values())
EDIT_KEYS = {
    **CHANGES,
    "position": Field({**integer_in(-1, 0), "title": "0 (before all others) or -1 (behind them)"},
                      "0: before all others; -1: behind them", default=None),
    "before": Field(NAMED, "the pending job, by its id or name, right before which it is to be", default=None)}
EDIT = object_of(EDIT_KEYS, "a change of a job", nulls=CLEARED, required=(), minProperties=1,
                 examples=[{"gpus": 2}, {"timeout_seconds": None}, {"position": 0}])
CHANGE = object_of(CHANGES, "a change of a job", nulls=CLEARED, required=())
EDIT_CHOICE_KEYS = {**CHOICE_KEYS, "change": Field(
    EDIT, "what is to be otherwise", convert=functools.partial(read_object, EDIT_KEYS, EDIT))}
EDIT_CHOICE = object_of(EDIT_CHOICE_KEYS, "which jobs, and what is to be otherwise", minProperties=2,
                        examples=[{"ids": ["abc", "abd"], "change": {"position": 0}},
                                  {"group": "sweep", "change": {"timeout_seconds": 3600}}])
CLEAR_KEYS = {**CHOICE_KEYS, "dry_run": Field(FLAG, "forget nothing: tell which, and what it would free",
                                              default=False)}
CLEAR = object_of(CLEAR_KEYS, "which jobs", minProperties=1, examples=[
    {"ids": ["abc", "abd"]}, {"older": "30d", "dry_run": True}])
DISMISS_KEYS = {**CHOICE_KEYS, "undo": Field(FLAG, "show them again", default=False)}
DISMISS = object_of(DISMISS_KEYS, "which failures", minProperties=1, examples=[
    {"status": "failed"}, {"group": "sweep", "undo": True}])
SET: Schema = {
    "type": "object", "maxProperties": 100, "minProperties": 1, "propertyNames": LINE,
    "examples": [{"bs": ["48", "64"]}],
    "additionalProperties": list_of({**TEXT, "minLength": 1, "x-max-bytes": MAX_SWEEP_BYTES}, 1, MAX_SWEEP)}
RETRY_KEYS = {
    **CHOICE_KEYS, "dry_run": Field(
        FLAG, "check, and run nothing again: `jobs` are those that would be added", default=False),
    "downstream": Field(
        FLAG, "also the jobs that were cancelled as these did not complete, each after the new ones", default=False),
    "set": Field(
        SET, "other values of their sweep, {name: [values]}; of several, each has a job", default=None),
    "change": Field(
        CHANGE, "what is to be otherwise", default=None, convert=functools.partial(read_object, CHANGES, CHANGE))}
RETRY = object_of(RETRY_KEYS, "which jobs, and what is to be otherwise", minProperties=1,
                  examples=[{"ids": ["abc"]}, {"group": "sweep", "change": {"gpus": 2, "env": {"SEED": "1"}}}])

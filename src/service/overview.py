"""GET /status?after=: an overview of jobs, groups and GPUs, told anew when something changes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..values.choice import Choice
from ..values.job import FAILED, FINAL, PENDING, RUNNING
from ..values.text import format_time, parse_time
from ..views.api_json import GPU_READINGS, OVERVIEW_GPU_KEYS, OVERVIEW_JOB_KEYS, drop_nulls, make_patch, pick
from ..views.row_labels import label_rows
from .access import Identity, list_visible_groups
from .job_lists import JobLists

if TYPE_CHECKING:
    from typing import Any

    from .service import Service

MAX_DOCUMENTS = 20              # kept of all callers
MAX_FAILURES = 20               # shown at once, of groups and of jobs without one
MAX_NAMED = 5                   # groups whose name has the text that is looked for


def settle(row: Mapping[str, Any]) -> dict[str, Any]:
    """A job's row without what changes by the second: clients know the time, and a start is an estimate.

    Its label tells what matters of its values.
    """
    start = row["estimated_start"]
    return drop_nulls({
        **row, "sweep_values": None, "runtime_seconds": row["runtime_seconds"] if row["status"] in FINAL else None,
        "is_held": row["is_held"] or None,
        "estimated_start": start and format_time(math.ceil(parse_time(start) / 60) * 60)})


class Overview(Component):
    """GET /status?after=: what has changed of the jobs and GPUs that one looks at all day.

    The latest documents are kept, with their versions: an answer is the difference from the one that the caller has.
    """

    def __init__(self, service: Service) -> None:
        import threading
        super().__init__(service)
        self.lock = threading.Lock()
        self.documents: dict[tuple[Any, int], dict[str, Any]] = {}      # {(whose and which view, version): document}

    def find_changes(self, after: int, caller: Identity, choice: Choice, limit: int) -> dict[str, Any]:
        """The difference from the caller's version; all of it with `is_whole` when that is not known any more."""
        view = caller.user, caller.is_owner, choice, limit
        with self.lock:
            version, document = self.store.version, self.describe(caller, choice, limit)
            if self.documents.get((view, version), document) != document:       # readings and logs change no State
                self.store.note_change()
                version = self.store.version
            self.documents.pop((view, version), None)
            self.documents[view, version] = document
            for key in list(self.documents)[:-MAX_DOCUMENTS]:
                del self.documents[key]
            former = self.documents.get((view, after))
        changes = document if former is None else make_patch(former, document)
        return {"state_version": version, "is_whole": former is None, **changes}

    def describe(self, caller: Identity, choice: Choice, limit: int) -> dict[str, Any]:
        """The document.  Its rows are without what is null."""
        import itertools
        from collections import Counter
        service, state = self.service, self.store.state
        checks, is_chosen = service.health.list_checks(), bool(choice.given)
        status = service.status.describe_for(caller, checks)
        visible = list_visible_groups(state, caller) if not is_chosen or choice.group or choice.text else {}
        lists = JobLists(state, caller, choice, {} if is_chosen else visible, self.clock.now())
        waiting, ended = (list(itertools.islice(jobs, limit)) for jobs in (lists.waiting, lists.ended))
        failures = lists.fold_failures()[:MAX_FAILURES]
        listed = [*waiting, *ended]
        groups = {job.group for job in listed if lists.is_folded(job)} | {choice.group}
        named = [name for name in visible if choice.text and choice.text.lower() in name.lower()][:MAX_NAMED]
        shown = [job for job in listed if not lists.is_folded(job)]
        rows = [*state.running.values(), *shown, *(job for job, *_ in failures)]
        users_of = {name: users for name, users in visible.items() if name in {*groups, *named}}
        described = service.job_serializer.describe_jobs(rows, OVERVIEW_JOB_KEYS)
        told = [caller.show(job.user, row) for job, row in zip(rows, described)]
        labels, left = label_rows(told), Counter(job.group for job in lists.failures)
        return {
            **pick(status, (
                "version", "user", "others", "is_owner", "is_paused", "host", "slurm", "gpu_trouble", "bad_checks")),
            "next_turn": status["next_turn"] and status["next_turn"]["user"],
            # A group's row tells that it is held.
            "disk_use": service.disk_use.measured if caller.is_owner else None,
            "hints": service.health.list_hints(checks) if caller.is_owner else [],
            "defaults": service.validator.defaults,
            "counts": {PENDING: len(state.pending), RUNNING: len(state.running),
                       **{word: len(state.ended.get(word, ())) for word in FINAL}},
            "readings": {gpu["place"]: drop_nulls(pick(gpu, GPU_READINGS)) for gpu in status["gpu_status"]},
            "gpus": {gpu["place"]: drop_nulls(pick(gpu, OVERVIEW_GPU_KEYS)) for gpu in status["gpu_status"]},
            "nodes": {node["name"]: drop_nulls(node) for node in status["nodes"]},
            "jobs": {job.id: settle({**row, "label": labels.get(job.id), "is_dismissed": (
                job.status == FAILED and caller.user in job.dismissed_by) or None}) for job, row in zip(rows, told)},
            "groups": {name: drop_nulls({**row, "failures": left[name]})
                       for name, row in service.groups.describe_groups(state, users_of).items()},
            "waiting": [lists.name_entry(job) for job in waiting], "ended": [lists.name_entry(job) for job in ended],
            "failures": [[job.id, count, kinds] for job, count, kinds in failures],
            "found": {"running": [job.id for job in lists.running] if is_chosen else None, "groups": named,
                      "waiting": lists.waiting_count, "ended": lists.ended_count, "failures": len(lists.failures)}}

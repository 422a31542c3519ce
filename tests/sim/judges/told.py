"""What is told: reasons, positions, views and their patches, what others see, notices."""
from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from judges.judge import Judge

if TYPE_CHECKING:
    from homes import Home
    from world import Notice

ENDED = ("completed", "failed", "cancelled")
UNSTEADY = {"state_version", "is_whole", "readings", "host"}       # of a view: it may be told with the next news
# Of other users' jobs one sees that they exist: which, whose, where and when, and what they hold or ask for.
SEEN_BY_ALL = {
    "id", "user", "status", "position", "estimated_start", "created_at", "started_at", "finished_at", "runtime_seconds", "node",
    "gpu_index", "gpu_indices", "gpu_uuids", "gpu_places", "gpus", "gpu_ids", "gpu_mem_mib", "gpu_type", "preemptible", "priority",
    "timeout_seconds", "expected_time", "processes_left", "attempt"}
STALE_S = 5.0                       # a plan may be so old
QUIET_S = 60.0                      # nothing of a group has waited or run for so long: its end is told


def read_time(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def apply_patch(target: Any, patch: Any) -> Any:
    """JSON Merge Patch, as RFC 7396 has it."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply_patch(merged.get(name), value)
    return merged


def leave_out_nulls(value: Any) -> Any:
    """A merge patch cannot say null."""
    if isinstance(value, dict):
        return {name: leave_out_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


def list_jobs_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """All that looks like a job in a reply."""
    if isinstance(value, dict):
        if "user" in value and "status" in value and "id" in value:
            yield value
        for inner in value.values():
            yield from list_jobs_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from list_jobs_in(inner)


class Told(Judge):
    def __init__(self, actions: Any) -> None:
        super().__init__(actions)
        self.look_count = 0
        self.views: dict[tuple[str, str], dict[str, Any]] = {}              # {(home, user): what its page shows}
        self.doubtful: dict[tuple[str, str], tuple[float, str]] = {}        # {(home, job): (since when, its wrong reason)}

    def look(self) -> None:
        """One thing at a time, in turns: all of them each time would take as long as the rest of the history."""
        self.look_count += 1
        for home in self.list_homes():
            if not home.service.gpu_watch.first_probe.is_set():         # a view waits for the first look at the GPUs
                continue
            if self.look_count % 2:
                self.check_queue(home)
            elif self.look_count % 4:
                self.check_view(home, "")
            else:
                self.check_view(home, "bob")
                self.check_privacy(home)

    # The queue

    def check_queue(self, home: Home) -> None:
        """Places are those of the list, and what is counted is what is there."""
        now, jobs = home.host.wall(), {job["id"]: job for job in self.read_jobs(home)}
        queue, status = home.call("GET", "/queue")[1], home.call("GET", "/status")[1]
        self.check_reasons(home, queue, jobs, status["is_paused"])
        self.check_estimates(now, jobs.values())
        self.check_times(now, jobs)
        if [job["position"] for job in queue] != [*range(len(queue))]:
            self.fail(f"the places of the queue are {[(job['id'], job['position']) for job in queue]}")
        counts = {word: sum(job["status"] == word for job in jobs.values()) for word in (*ENDED, "pending", "running")}
        shown = {**{word: status[f"{word}_jobs"] for word in ENDED},
                 "pending": status["queued_jobs"], "running": len(status["running_jobs"])}
        if counts != shown or {job["id"] for job in queue} != {name for name, job in jobs.items() if job["status"] == "pending"}:
            self.fail(f"GET /status counts {shown}, GET /jobs {counts}, GET /queue {len(queue)}")

    def check_reasons(self, home: Home, queue: Sequence[Mapping[str, Any]], jobs: Mapping[str, Mapping[str, Any]],
                      is_paused: bool) -> None:
        """Each waiting job has a reason, and what it names is in the way, but for a moment."""
        groups = {row["name"]: row for row in home.call("GET", "/groups")[1]}
        doubtful = {}
        for job in queue:
            if not job["reason"]:
                self.fail(f"job {job['id']} waits without a reason")
                continue
            wrong = find_wrong(job, jobs, groups, is_paused, home.host.wall())
            since, before = self.doubtful.get((home.path, job["id"]), (self.world.now, wrong))
            if wrong and wrong == before:
                doubtful[home.path, job["id"]] = since, wrong
                if self.setup.is_calm and self.world.now - since > STALE_S and self.is_planned_since(home, since):
                    self.fail(f"job {job['id']} waits for {job['reason']}, but {wrong}")
        self.doubtful = {**{key: row for key, row in self.doubtful.items() if key[0] != home.path}, **doubtful}

    def is_planned_since(self, home: Home, since: float) -> bool:
        """Whether its loop has gone on: a service that gets no time tells what it has last seen."""
        return bool(home.process) and home.process.looked_at > since + STALE_S

    def check_estimates(self, now: float, jobs: Iterable[Mapping[str, Any]]) -> None:
        """What is estimated is not over."""
        for job in jobs:
            for name in ("estimated_start", "estimated_end"):
                if job.get(name) and read_time(job[name]) < now - 1.0:
                    self.fail(f"job {job['id']} is {job['status']}, and its {name} {job[name]} is over since "
                              f"{now - read_time(job[name]):.1f} s")

    def check_times(self, now: float, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """What happened was in its order, where no clock has been set."""
        for job in jobs.values():
            times = [read_time(job[name]) for name in ("created_at", "started_at", "finished_at") if job[name]]
            if self.setup.is_calm and (times != sorted(times) or times[-1] > now + 1.0):
                self.fail(f"the times of job {job['id']} are {times}, now {now}")

    # Views

    def check_view(self, home: Home, user: str) -> None:
        """What a page has that only ever heard of changes is what a new page gets."""
        now, whole = home.host.wall(), home.call("GET", "/status?after=0", user=user)[1]
        view = self.views.get((home.path, user))
        if not isinstance(whole, dict):
            return
        self.check_estimates(now, list_jobs_in(whole))
        if view and find_steady(view) != find_steady(whole):
            changes = home.call("GET", f"/status?after={view['state_version']}", user=user)[1]
            if not isinstance(changes, dict):
                return
            view = changes if changes["is_whole"] else apply_patch(view, changes)
            if find_steady(view) != find_steady(whole):
                differ = [name for name in whole if leave_out_nulls(whole[name]) != leave_out_nulls(view.get(name))
                          and name not in UNSTEADY]
                self.fail(f"a patched view of {user or 'the owner'} differs in {differ}: "
                          f"{[(view.get(name), whole[name]) for name in differ]}"[:1500])
        self.views[home.path, user] = view or whole

    def check_privacy(self, home: Home) -> None:
        """bob sees of others' jobs only that they exist, wherever he looks."""
        for path in ("/jobs", "/queue", "/status", "/status?after=0", "/groups", "/gpus/history?since=7d"):
            status, reply = home.call("GET", path, user="bob")
            for job in list_jobs_in(reply):
                told = {name for name, value in job.items() if value is not None} - SEEN_BY_ALL
                if job["user"] != "bob" and told:
                    self.fail(f"GET {path} tells bob of job {job['id']} of {job['user']}: {sorted(told)}")
        others = [job for job in home.call("GET", "/jobs?limit=5")[1] if job["user"] != "bob"]
        for job in others[:1]:
            for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/logs", f"/jobs/{job['id']}/why", f"/api/results/{job['id']}"):
                status, reply = home.call("GET", path, user="bob")
                if status not in (403, 404):
                    self.fail(f"GET {path} answers bob {status}: {json.dumps(reply, default=str)[:200]}")

    # Notices

    def on_notice(self, notice: Notice) -> None:
        """A hook is run: of a job that has ended, or a group of which nothing has waited or run for a minute."""
        home = next(home for home in self.homes if home.path == notice.home)
        facts = notice.facts
        if notice.hook == "on_finish":
            status, job = home.call("GET", f"/jobs/{facts['NEXUS_JOB_ID']}")
            told = facts["NEXUS_JOB_STATUS"], facts["NEXUS_JOB_CAUSE"]
            if status == 200 and (job["status"], job["cause"] or "") != told:
                self.fail(f"on_finish tells {told} of job {job['id']}, which is {job['status']} ({job['cause']})")
        if notice.hook == "on_group_finish" and self.setup.is_calm:
            members = home.call("GET", f"/jobs?group={facts['NEXUS_GROUP']}")[1]
            for user in {job["user"] for job in members}:
                ends = [job["finished_at"] and read_time(job["finished_at"]) for job in members if job["user"] == user]
                if all(ends) and max(ends) <= home.host.wall() - QUIET_S + 1.0:
                    return                          # of this user's it may be told
            self.fail(f"on_group_finish is told of {facts['NEXUS_GROUP']}, whose jobs have ended "
                      f"{[(job['id'], job['finished_at']) for job in members]}")

    def on_settled(self) -> None:
        """Of each job that has ended it was told: once, but where the service was killed as it noted that."""
        for home in self.list_homes():
            told: dict[str, list[Notice]] = {}
            for notice in self.world.notices:
                if (notice.home, notice.hook) == (home.path, "on_finish"):
                    told.setdefault(notice.facts["NEXUS_JOB_ID"], []).append(notice)
            if not self.setup.has_hooks or home.is_damaged:
                continue
            for job in home.call("GET", "/jobs")[1]:
                if job["id"] not in told:
                    self.fail(f"job {job['id']} is {job['status']}, and on_finish has not run for it")
            for job_id, notices in told.items():
                again = [notice for notice in notices[:-1] if notice.process.is_alive or notice.process.ended_at > notice.at + 1.0]
                if again and self.setup.is_calm:
                    self.fail(f"on_finish has run {len(notices)} times for job {job_id}")


def find_steady(view: Mapping[str, Any]) -> Any:
    return leave_out_nulls({name: value for name, value in view.items() if name not in UNSTEADY})


def find_wrong(job: Mapping[str, Any], jobs: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Mapping[str, Any]],
               is_paused: bool, now: float) -> str:
    """What speaks against the reason of a waiting job; "" if it is a good one."""
    code, subject = job["reason"]["code"], job["reason"]["subject"]
    running = [other for other in jobs.values() if other["status"] == "running" or other.get("slurm_id")]      # or is Slurm's
    parents = subject.split(",") if code == "dependency" else []
    ended = [parent for parent in parents if parent in jobs and jobs[parent]["status"] in ENDED]
    if ended:
        return f"{ended} have ended"
    is_gpu = re.fullmatch(r"(\w+:)?\d+(\.\d+)?", subject)
    if parents and subject not in [*jobs, *(other["group"] for other in jobs.values() if other["status"] not in ENDED)] and (
            len(parents) == 1):
        return f"nothing of {subject} waits or runs"
    if code == "held" and not is_gpu and not (job["is_held"] or (job["group"] and groups[job["group"]]["hold"])):
        return "neither it nor its group is held"
    if code == "paused" and subject == "queue" and not is_paused:
        return "the queue is not paused"
    begins = job["retry_at" if subject == "retry" else "begin_at"]
    if code == "begin-time" and begins and read_time(begins) < now - STALE_S:
        return f"its time {begins} has come"
    if code == "quota" and not running:
        return "nothing runs"
    return ""

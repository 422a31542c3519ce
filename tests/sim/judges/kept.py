"""What is kept: logs, attempts, usage, the history of GPUs; jobs as long as they may be needed; who has added what."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import nexus
from judges.judge import Judge

if TYPE_CHECKING:
    from homes import Home

FINAL = ("completed", "failed", "cancelled")
LINE = re.compile(rb"line [0-9]+ of [0-9]+")
REQUEUES = ("preempted", "requeued")
NEAR_S = 0.01


class Kept(Judge):
    def __init__(self, actions: Any) -> None:
        super().__init__(actions)
        self.states: dict[str, nexus.State] = {}            # {home: the last one that was looked at}
        self.gone: dict[str, dict[str, nexus.Job]] = {home.path: {} for home in self.homes}     # as they were at last
        self.power_cuts = {home.path: 0 for home in self.homes}         # until those states
        self.cleared: set[str] = set()
        self.attempts: dict[tuple[str, int], dict[str, Any]] = {}       # those that have ended, as they were told
        self.read: dict[str, tuple[object, ...]] = {}       # {job id: what its log was when it was compared}
        self.envs: dict[str, Any] = {}                      # {job id: its own variables; None: not known}
        self.keyed: dict[tuple[str, str, str], list[str]] = {}          # {(home, user, key): what it added first}

    def is_whole(self, home: Home) -> bool:
        """Nothing of its state was lost with what was damaged, or with the power."""
        return not (home.is_damaged or home.lost_power)

    # Jobs are forgotten

    def after_step(self) -> None:
        for home in self.homes:
            store = home.store if not home.is_up else home.service.store
            former = self.states.get(home.path)
            if store is None or not store.states or store.state is former:
                continue
            for state in self.list_new_states(store, former):
                gone = former.jobs.keys() - state.jobs.keys() if former else ()
                for job_id in gone:
                    assert former
                    self.gone[home.path][job_id] = former.jobs[job_id]
                    if self.is_whole(home) and home.power_cuts == self.power_cuts[home.path]:
                        self.check_gone(home, state, former.jobs[job_id])
                former = self.states[home.path] = state
            self.power_cuts[home.path] = home.power_cuts

    def list_new_states(self, store: Any, former: nexus.State | None) -> list[nexus.State]:
        states = list(store.states)
        at = next((number for number in range(len(states) - 1, -1, -1) if states[number] is former), None)
        return states[at + 1:] if at is not None else states[-1:]

    def check_gone(self, home: Home, state: nexus.State, job: nexus.Job) -> None:
        """Only what has ended is forgotten: as somebody asked, or beyond history_limit, the oldest first."""
        if job.status not in FINAL:
            self.fail(f"job {job.id} is {job.status}, and was forgotten")
        if job.id in self.cleared or not self.setup.is_calm:
            return                              # elsewhere a killed service may not have said what it has cleared
        later = [other for other in self.list_alike(state, job) if find_end(other) >= find_end(job)]
        if len(later) < self.setup.history_limit:
            self.fail(f"job {job.id} was forgotten, and history_limit is {self.setup.history_limit}: "
                      f"of its kind only {[other.id for other in later]} have ended since")

    def list_alike(self, state: nexus.State, job: nexus.Job) -> list[nexus.Job]:
        """Finished jobs of the same user: those that ran, or those that never did."""
        return [other for other in state.jobs.values() if other.status in FINAL and other.user == job.user
                and has_run(other) == has_run(job)]

    def check_limit(self, home: Home) -> None:
        """Of each user as many finished jobs are kept as may be, and whose hook is due; the logs of the others are gone with them."""
        kept = Counter((job.user, has_run(job)) for job in home.service.store.state.jobs.values()
                       if job.status in FINAL and not job.is_hook_due)
        if any(count > self.setup.history_limit for count in kept.values()):
            self.fail(f"history_limit is {self.setup.history_limit}, and there are {kept}")
        for job in self.gone[home.path].values() if self.setup.is_calm else ():
            if job.log_dir and find_folder(home, job.log_dir):
                self.fail(f"job {job.id} is forgotten, and its logs are not: {job.log_dir}")

    # Who has added what

    def on_request(self, home: Home, method: str, path: str, body: Any, user: str, status: int, reply: Any) -> None:
        if path == "/jobs/clear" and status == 200:
            self.cleared |= {*reply["ids"]}
        elif method == "PATCH" and isinstance(body, dict) and "env" in str(body):
            self.envs.update(dict.fromkeys(self.envs))
        elif method == "POST" and path == "/queue" and home.is_up and not self.is_dry(body):
            if status == 200:
                ids = [reply["id"]] if "id" in reply else reply["ids"]
                known = {*reply.get("known", ())}
                is_known = home.key and self.check_key(home, user, home.key, ids, known)
                if not is_known and isinstance(body, dict):
                    self.check_unique(home, body, ids, known)
            self.note_envs(home, body if isinstance(body, dict) else {}, status, reply)

    def is_dry(self, body: Any) -> bool:
        return any(isinstance(one, dict) and one.get("dry_run") for one in (body if isinstance(body, list) else [body]))

    def check_key(self, home: Home, user: str, key: str, ids: list[str], known: set[str]) -> bool:
        """The same key is answered with the jobs that it added, as long as they are kept; return whether it was.

        Which jobs were there before, and were not added because of `unique`, may be another matter by now.
        """
        place = home.path, user, key
        jobs = home.service.store.state.jobs
        first = [job_id for job_id in self.keyed.get(place, ()) if job_id in jobs]
        if place not in self.keyed:             # the first answer may have been lost
            first = [job_id for job_id in ids if job_id in self.envs and (jobs[job_id].key or "").endswith(key)]
        is_again = bool(first) and {*first} <= {*ids}
        if first and not is_again and self.is_whole(home):
            self.fail(f"key {key} was answered with {first}, and now with {ids}")
        self.keyed[place] = first if is_again else [job_id for job_id in ids if job_id not in known]
        return is_again

    def check_unique(self, home: Home, body: dict[str, Any], ids: list[str], known: set[str]) -> None:
        """--unique adds nothing if the same job waits, runs, or has completed; without it each is a new one."""
        jobs = home.service.store.state.jobs
        old = {job_id for job_id in ids if job_id in self.envs}
        if not body.get("unique"):
            if old or known:
                self.fail(f"jobs {sorted(old | known)} are answered as if they were new")
            return
        if "command" not in body or not self.is_whole(home):
            return
        content, env = find_content(jobs[ids[0]]), body.get("env") or {}
        new = {*ids} - known - self.envs.keys()
        alike = [job_id for job_id, job in jobs.items() if find_content(job) == content and job_id not in new
                 and job.status not in ("failed", "cancelled")]
        if any(self.envs.get(job_id) is None for job_id in alike):
            return                              # such a one came in another way, like a retry
        same = [job_id for job_id in alike if self.envs[job_id] == env]
        if bool(same) != bool(old) or known != old:
            self.fail(f"a job that was to be unique is answered with {ids}, of which {sorted(known)} were known: "
                      f"there are {same} of the same kind")

    def note_envs(self, home: Home, body: dict[str, Any], status: int, reply: Any) -> None:
        """Keep the variables of new jobs; of those that came in another way, like a retry, they are not known."""
        for job_id in home.service.store.state.jobs.keys() - self.envs.keys():
            is_plain = status == 200 and "command" in body and job_id == reply.get("id")
            self.envs[job_id] = (body.get("env") or {}) if is_plain else None

    # What is told

    def look(self) -> None:
        for home in self.list_homes():
            self.check_output(home)
            if self.is_whole(home):
                self.check_attempts(home)
                if self.setup.is_calm:
                    self.check_logs(home)

    def on_settled(self) -> None:
        self.after_step()
        for home in self.list_homes():
            self.check_history(home)
            if self.is_whole(home):
                self.check_limit(home)
                if not self.world.has_moved:
                    for way in ("user", "group"):
                        self.check_usage(home, way)

    def check_output(self, home: Home) -> None:
        """A job's log has what its own attempts have printed, each once."""
        for job in home.service.store.state.jobs.values():
            text = nexus.read_part(home.disk, f"{job.log_dir}/stdout.log", 0, 100000).decode(errors="replace")
            # A full disk may have cut a line, behind which the next attempt's begins.
            told = re.findall("run ([A-Za-z]{3})(?: ([0-9]+))?", text)
            numbers = [number for _, number in told if number]
            if any(name != job.id for name, _ in told) or len(set(numbers)) < len(numbers):
                self.fail(f"the log of job {job.id} has {text!r}")

    def check_logs(self, home: Home) -> None:
        """What a job has printed is told byte for byte; what comes from a node may come a little later."""
        for job in home.service.store.state.jobs.values():
            printed = self.world.printed.get(job.id)
            key = job.status, *map(len, printed or ())
            if not printed or self.read.get(job.id) == key:
                continue
            self.read[job.id] = key
            if job.status in FINAL:
                self.check_bytes(home, job, 0, len(printed[0]) // 2)
                self.check_bytes(home, job, 1, 0)
                self.check_lines(home, job.id, printed)
            self.check_bytes(home, job, 0, 0)

    def check_bytes(self, home: Home, job: nexus.Job, stream: int, start: int) -> None:
        whole = bytes(self.world.printed[job.id][stream])[start:]
        offset, name = f"0,{start}" if stream else f"{start},0", ("stdout", "stderr")[stream]
        status, text = home.call("GET", f"/jobs/{job.id}/logs?stream={name}&offset={offset}")
        is_far = job.status not in FINAL and job.current.node
        if status != 200 or (text != whole and not (is_far and whole.startswith(text))):
            self.fail(f"from byte {start} on the {name} of job {job.id} is told as {text!r}, and it has printed {whole!r}")

    def check_lines(self, home: Home, job_id: str, printed: tuple[bytearray, bytearray]) -> None:
        """Both streams together have each line once, those of one stream in their order; a tail has the last ones."""
        told = LINE.findall(home.call("GET", f"/jobs/{job_id}/logs")[1])
        for content in printed:
            lines = LINE.findall(content)
            if [line for line in told if line in {*lines}] != lines:
                self.fail(f"of job {job_id} {told} is told, and it has printed {lines}")
        tail = home.call("GET", f"/jobs/{job_id}/logs?stream=stdout&tail=4")[1]
        last = [line for piece in bytes(printed[0]).splitlines(keepends=True)[-4:] for line in LINE.findall(piece)]
        if LINE.findall(tail)[-len(last) or None:] != last:
            self.fail(f"the last lines of job {job_id} are told as {tail!r}, and they are {last}")

    def check_attempts(self, home: Home) -> None:
        """All that is known of an attempt which has ended stays known, and so do all that began."""
        for job in self.read_jobs(home):
            for attempt in job["attempts"]:
                if attempt["finished_at"] and (attempt is not job["attempts"][-1] or job["status"] in FINAL):
                    key = job["id"], attempt["attempt"]
                    former = self.attempts.setdefault(key, attempt)
                    if former != attempt:
                        differing = {name: (former[name], attempt[name]) for name in attempt if former[name] != attempt[name]}
                        self.fail(f"attempt {key[1]} of job {key[0]} is told otherwise than before: {differing}")
            if job["status"] in FINAL and self.setup.is_calm:
                told = {attempt["attempt"] for attempt in job["attempts"]}
                ran = {run.job.attempt for run in self.world.runs if run.job.id == job["id"]}
                if ran - told:
                    self.fail(f"of the attempts {sorted(ran)} of job {job['id']} only {sorted(told)} are told")

    def list_all(self, home: Home) -> Iterator[nexus.Job]:
        """The jobs that are kept, and those that are forgotten."""
        yield from self.gone[home.path].values()
        yield from home.service.store.state.jobs.values()

    def check_usage(self, home: Home, by: str) -> None:
        """Usage is the sum of the attempts, also of jobs that are forgotten."""
        now, sums = home.service.clock.now(), dict[str, list[float]]()
        for job in self.list_all(home):
            spans = [(one.started_at, now if one.finished_at is None else one.finished_at) for one in job.attempts
                     if one.started_at is not None]
            if not spans:
                continue
            row = sums.setdefault(job.user if by == "user" else job.group or "-", [0.0] * 5)
            seconds = sum(end - begin for begin, end in spans)
            for at, more in enumerate((1, job.status in FINAL, job.status == "failed", seconds * job.gpus,
                                       0 if job.gpus else seconds)):
                row[at] += more
        told = {row[by]: [row["jobs"], row["ended"], row["failed"], row["gpu_hours"] * 3600, row["cpu_job_hours"] * 3600]
                for row in home.call("GET", f"/usage?since=30d&by={by}")[1] if row[by] != "(others)"}
        if told.keys() != sums.keys() or any(abs(mine - other) > NEAR_S for name, row in sums.items()
                                             for mine, other in zip(row, told[name])):
            self.fail(f"usage by {by} (jobs, ended, failed, GPU seconds, CPU seconds) is told as {told}, and was {sums}")

    def check_history(self, home: Home) -> None:
        """Each attempt that had GPUs in the last days is told once, however the service ended since."""
        told = home.call("GET", "/gpus/history?since=7d")[1]["rows"]
        rows = [(row["id"], row["attempt"], row["started_at"]) for row in told]
        since = home.service.clock.now() - nexus.RUNS_S
        is_strict = self.setup.is_calm and not self.world.has_moved
        jobs = list(self.list_all(home)) if is_strict else [*home.service.store.state.jobs.values()]
        ran = {(job.id, attempt.number, nexus.format_time(attempt.started_at)): (job, attempt) for job in jobs
               for attempt in job.attempts
               if attempt.gpu_uuids and attempt.started_at is not None and (attempt.finished_at or since) > since}
        if len(set(rows)) < len(rows) or ran.keys() - set(rows):
            self.fail(f"of {sorted(ran)} these rows are told: {sorted(rows)}")
        for row in told if is_strict else ():
            job, attempt = ran[row["id"], row["attempt"], row["started_at"]]
            is_last = attempt is job.attempts[-1]
            status = job.status if is_last else attempt.cause if attempt.cause in REQUEUES else "failed"
            if (row["status"], row["finished_at"]) != (status, nexus.format_time(attempt.finished_at)):
                self.fail(f"attempt {row['attempt']} of job {row['id']} was {status}, and is told as {row}")


def has_run(job: nexus.Job) -> bool:
    return any(attempt.started_at is not None for attempt in job.attempts)


def find_end(job: nexus.Job) -> float:
    """When its status became final: its command may have ended sooner."""
    return job.status_history[-1][1]


def find_content(job: nexus.Job) -> object:
    """What --unique compares, but for the variables."""
    return job.user, job.command, job.cwd, job.conda


def find_folder(home: Home, path: str) -> bool:
    try:
        home.host.files.find(path)
    except OSError:
        return False
    return True

"""Histories: what happens to the machines, as a list of steps, and what must hold after each.

A step is [name, number]: what it does follows from the number and from what there is then.  So a history with some of
its steps left out is a history too, and the shortest one that still fails can be looked for.
"""
from __future__ import annotations

import errno
import json
import os
import random
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import versions
from cluster import Cluster
from world import HOME_FOLDER, LEASE_FOLDER, SIGKILL, WORK_FOLDER, Crash, Host, Patches, SimProcess, SimStore, Task, Violation, World

import nexus

Step = tuple[str, int]
STEPS = 200                         # of a history
CHECK_INTERVAL = 20                 # State is read back from the disk after so many steps
USERS = ("bob", "eve")              # who have tokens
OWNER_TOKEN = "f" * 48
SETTLING_S = 4 * 3600.0             # once the faults stop, all must have ended in this time
STATE_NAMES = ("state.json", "state.json.prev", "journal.jsonl", "journal.jsonl.prev")
FIRST_HOME, SECOND_HOME = f"{HOME_FOLDER}/.nexus", f"{HOME_FOLDER}/.nexus-b"


class Setup:
    """What a history begins with."""

    def __init__(self, seed: int) -> None:
        rnd = random.Random(seed)
        self.seed = seed
        self.launcher = rnd.choice(["screen", "direct"])
        self.cards = rnd.choice([1, 2, 2, 4])
        self.nodes = rnd.choice([0, 0, 0, 1, 2])
        self.homes = rnd.choice([1, 1, 1, 2])
        self.on_reboot = rnd.choice(["fail", "requeue"])
        self.history_limit = rnd.choice([1000, 1000, 3])
        self.max_running_per_user = rnd.choice([0, 0, 2])
        self.has_two_heads = rnd.random() < 0.3         # the second home has the same nodes
        if rnd.random() < 0.15:
            self.launcher, self.nodes, self.homes = "slurm", 0, 1
        self.version = rnd.choice(["this", "this", "this", "older"])        # of the first nexus.py: see versions.py

    @staticmethod
    def read(facts: Mapping[str, Any]) -> Setup:
        """The setup of a history that was kept."""
        setup = Setup(facts["seed"])
        vars(setup).update(facts)
        return setup


class Home:
    """A service's home, and what its callers were told."""

    def __init__(self, world: World, host: Host, path: str, setup: Setup) -> None:
        self.world, self.host, self.path = world, host, path
        nodes = [{"name": f"n{number}", "host": f"n{number}"} for number in range(1, setup.nodes + 1)]
        self.config = nexus.parse_config({
            "gpu": {"lease_dir": LEASE_FOLDER},
            "state": {"history_limit": setup.history_limit},
            "jobs": {"launcher": setup.launcher, "on_reboot": setup.on_reboot,
                     "max_running_per_user": setup.max_running_per_user},
            **({"nodes": nodes} if nodes and (path == FIRST_HOME or setup.has_two_heads) else {})}, "config.toml")
        self.layout = nexus.make_layout(path, self.config)
        self.process: SimProcess | None = None
        self.store: SimStore | None = None          # of the last service
        self.is_damaged = False                     # a bit was flipped, or a power cut took what was not synced
        self.flipped: list[str] = []                # the files of which a bit was flipped
        self.lost_power = False                     # since that service
        self.faults: list[str] = []
        disk = self.disk = SimProcess(host, "shell").disk
        tokens: dict[str, nexus.Token] = {}
        for user in USERS:
            tokens = nexus.add_token(tokens, user, f"{user}-" + "0" * 40, None, host.wall())
        rows = [nexus.token_json(token) for token in tokens.values()]
        nexus.write_atomic(disk, self.layout.tokens_file, [json.dumps({"tokens": rows})])
        nexus.write_atomic(disk, self.layout.token_file, [OWNER_TOKEN])
        for _, file in host.files.walk():
            file.sync()

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive and hasattr(self.process, "api")

    @property
    def service(self) -> nexus.Service:
        return self.process.service         # type: ignore[union-attr, no-any-return]

    def start(self) -> None:
        """What the supervisor does, or a person."""
        if self.process and self.process.is_alive:
            return
        self.note_end()
        process = self.process = SimProcess(self.host, "nexus serve", role="service")
        process.version = versions.find_version(self.host)
        process.home = self                 # type: ignore[attr-defined]
        environ = {"HOME": HOME_FOLDER, "PATH": "/usr/bin:/bin"}
        before = self.read_files()

        def run() -> None:
            try:
                nexus.serve(self.layout, self.config, environ, "", self.layout.config_file)
            except nexus.NexusError as error:
                self.faults.append(error.message)
                if error.kind == "conflict" and self.read_files() != before:
                    self.world.violations.append(f"a service that was refused has changed the state: {error}")

        process.on_end.append(self.note_end)
        Task(process, "main", run).go_on()
        if hasattr(process, "store"):           # it has read the state
            self.lost_power = False
            if self.is_damaged:
                self.forget_lost(process.store.state)

    def read_files(self) -> list[bytes]:
        """The files of the state, as they are."""
        found = self.host.files.find(self.layout.journal_dir).names
        return [bytes(found[name].content) if name in found else b"" for name in STATE_NAMES]

    def forget_lost(self, state: nexus.State) -> None:
        """A job.sh whose launch is lost with a damaged line is nobody's: its cards are free, for all that is known."""
        kept = {self.layout.folder_of(job) for job in state.live.values()}
        for process, _ in self.world.runners:
            folder = os.path.dirname(process.role.split()[1])
            process.is_forgotten |= folder.startswith(self.path + "/") and folder not in kept

    def note_end(self) -> None:
        self.store = getattr(self.process, "store", None) or self.store

    def kill(self) -> None:
        if self.process and self.process.is_alive:
            self.process.end(128 + SIGKILL)

    def stop(self) -> None:
        """`nexus stop`: it ends by itself, unless something is in its way."""
        process = self.process
        if not self.is_up or not process:
            return
        self.service.stop()
        give_up_at = self.world.now + nexus.START_TIMEOUT_S
        while process.is_alive and self.world.now < give_up_at:
            for task in [task for task in process.tasks if task.is_due()]:
                task.go_on()
            self.world.now += 0.05

    def call(self, method: str, path: str, body: Any = None, user: str = "") -> tuple[int, Any]:
        """(the status, 0 for none; the reply) of a request."""
        if not self.is_up:
            return 0, None
        process = self.process
        assert process
        headers = {"host": "127.0.0.1:7000"}
        if user:
            headers["authorization"] = f"Bearer {user}-" + "0" * 40
        content = json.dumps(body).encode() if body is not None else b""
        path, _, query = path.partition("?")
        parameters = dict(pair.split("=", 1) for pair in query.split("&") if pair)
        if body is not None:
            headers["content-type"] = "application/json"
        request = nexus.Request(method, path, {name: [text] for name, text in parameters.items()}, headers,
                                lambda: content, uid=None if user else os.geteuid(), body_length=len(content))
        with process.being_run():
            try:
                response = process.api.handle(request)          # type: ignore[attr-defined]
                text = b"".join(response.stream) if response.stream else response.body
                if response.after:
                    response.after()
            except Crash:
                return 0, None
        if response.status >= 500 and response.status != 503:
            self.world.violations.append(f"{method} {path}: {response.status} {text[:300]!r}")
        return response.status, json.loads(text) if text[:1] in (b"{", b"[") else text

    # What must hold

    def compare(self) -> None:
        """State read back from the disk is that of the service that runs, or was the last."""
        self.note_end()
        try:
            with self.disk.process.being_run():
                found = versions.find_recovery(self.disk, self.layout)
        except (OSError, nexus.NexusError) as error:
            raise Violation(f"the state cannot be read: {error}") from error
        self.check_recovery(found)

    def check_recovery(self, found: nexus.Recovery) -> None:
        """State read back is a State that the service had, and none before what it has acknowledged."""
        store = self.store
        if store is None or not store.states or (self.is_damaged and len(self.flipped) != 1):
            return
        state, latest = found.state, store.state
        if self.is_damaged:
            lost = latest.jobs.keys() - state.jobs.keys()
            if self.flipped[0].startswith("state.json") and lost and not self.lost_power:
                raise Violation(f"a bit of {self.flipped[0]} was flipped, and jobs are lost: {sorted(lost)}")
            return
        if found.damage and self.lost_power and state.seq >= store.synced_seq:
            self.is_damaged = True          # of what was not synced, later lines may be there and earlier ones not
            return
        if found.damage:
            raise Violation(f"damaged without a fault of the disk: {found.damage[0]['words']}")
        first = store.synced_seq if self.lost_power else latest.seq
        if state.seq < first:
            raise Violation(f"change {first} was acknowledged, and {state.seq} is the last one on the disk")
        known = next((one for one in reversed(store.states) if one.seq == state.seq), None)
        if known is not None:
            is_edited = nexus.stamp_of(self.disk, self.layout.state_file) != store.stamp
            facts = () if is_edited else ("paused", "paused_gpus")
            for table in (*nexus.ROWS, *facts, "pause_reasons", "has_hook", "has_group_hook"):
                ours, theirs = find_used(known, table), find_used(state, table)
                if ours != theirs:
                    raise Violation(f"{table} in memory and on the disk differ: {describe_difference(ours, theirs)}")
        elif state.seq > latest.seq + 1:
            raise Violation(f"the disk has change {state.seq}, and memory {latest.seq}")

    def check_codes(self) -> None:
        """An exit code that is shown is the command's."""
        if not self.is_up:
            return
        for job in self.service.store.state.jobs.values():
            for attempt_number, attempt in enumerate(job.attempts, 1):
                if attempt.exit_code is None:
                    continue
                runs = [run for run in self.world.runs
                        if (run.job.id, run.job.current.nonce) == (job.id, attempt.nonce)]
                if not any(run.code == attempt.exit_code for run in runs):
                    raise Violation(f"job {job.id}, attempt {attempt_number}: exit code {attempt.exit_code} is shown, and "
                                    f"its command has ended with {[run.code for run in runs]}")

    def check_output(self) -> None:
        """A job's log has what its own attempts have printed, each once."""
        if not self.is_up:
            return
        for job in self.service.store.state.jobs.values():
            path = f"{job.log_dir}/stdout.log"
            text = nexus.read_part(self.disk, path, 0, 10000).decode()
            # A full disk may have cut a line, behind which the next attempt's begins.
            told = re.findall("run ([A-Za-z]{3})(?: ([0-9]+))?", text)
            numbers = [number for _, number in told if number]
            if any(name != job.id for name, _ in told) or len(set(numbers)) < len(numbers):
                raise Violation(f"the log of job {job.id} has {text!r}")

    def check_history(self) -> None:
        """Each attempt that had GPUs in the last days is told once, however the service ended since."""
        rows = [(row["id"], row["attempt"], row["started_at"]) for row in self.call("GET", "/gpus/history?since=7d")[1]["rows"]]
        since = self.service.clock.now() - nexus.RUNS_S
        ran = {(job.id, attempt.number, nexus.format_time(attempt.started_at))
               for job in self.service.store.state.jobs.values() for attempt in job.attempts
               if attempt.gpu_uuids and attempt.started_at is not None and (attempt.finished_at or since) > since}
        if len(set(rows)) < len(rows) or ran - set(rows):
            raise Violation(f"of {sorted(ran)} these rows are told: {sorted(rows)}")

    def check_groups(self) -> None:
        """Who comes after a group waits as long as a job of it has not ended."""
        if not self.is_up or self.is_damaged:
            return
        jobs = self.service.store.state.jobs.values()
        unfinished = {group for job in jobs if job.status not in nexus.FINAL for group in (job.group, *job.retried_groups)}
        for job in jobs:
            awaited = unfinished.intersection((*job.after_group, *job.after_any_group))
            if job.status == "pending" and not job.attempts and {*job.pending_groups} != awaited:
                raise Violation(f"job {job.id} waits for the groups {job.pending_groups}, and not {sorted(map(str, awaited))}")

    def check_reasons(self) -> None:
        """Each waiting job has a reason."""
        status, jobs = self.call("GET", "/queue")
        for job in jobs if status == 200 else ():
            if not job["reason"]:
                raise Violation(f"job {job['id']} waits without a reason")


def find_used(state: nexus.State, table: str) -> Any:
    """A table without the rows that are only kept until the next start."""
    unused = {change.key for change in nexus.forget_unused(state) if change.table == table}
    rows = getattr(state, table)
    return {key: row for key, row in rows.items() if key not in unused} if unused else rows


def describe_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict):
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        return "; ".join(f"{key}: {ours.get(key)!r} and {theirs.get(key)!r}" for key in keys[:2])[:1500]
    return f"{ours!r} and {theirs!r}"


class Actions:
    """What may happen: each method is the name of a step, with chance as its argument."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.world = setup, World(setup.seed)
        self.world.hosts["a"] = host = Host(self.world, "a", setup.cards, setup.version)
        for number in range(1, setup.nodes + 1):
            self.world.hosts[f"n{number}"] = Host(self.world, f"n{number}", 2)
        if setup.launcher == "slurm":
            self.world.cluster = Cluster(self.world, host)
        self.homes = [Home(self.world, host, path, setup) for path in (FIRST_HOME, SECOND_HOME)[:setup.homes]]
        self.has_faults = True

    # What goes on by itself

    def list_tasks(self) -> list[Task]:
        return [task for host in self.world.hosts.values() for process in list(host.processes.values())
                for task in process.tasks if task.is_due()]

    def go_on(self, rnd: random.Random) -> None:
        """A loop or a worker of a service or an agent."""
        self.world.now += rnd.choice([0.001, 0.02, 0.1])
        tasks = self.list_tasks()
        if tasks:
            rnd.choice(tasks).go_on()

    def step_runner(self, rnd: random.Random, chosen: int | None = None) -> None:
        """A step of a job.sh."""
        runners = self.world.runners
        if not runners:
            return
        place = rnd.randrange(len(runners)) if chosen is None else chosen
        process, steps = runners[place]
        if not process.is_alive:
            del runners[place]
            return
        if process.state == "T" or self.world.now < process.slow_until:
            return
        try:
            with process.being_run():
                next(steps, None)
                is_over = steps.gi_frame is None        # type: ignore[attr-defined]
        except Crash:
            is_over = True
        if is_over:
            process.end(0)
            runners.remove((process, steps))

    def deliver(self, rnd: random.Random) -> None:
        """What was asked of a node arrives there."""
        lines = [line for host in self.world.hosts.values() for line in host.lines if line.to_agent]
        if lines:
            rnd.choice(lines).deliver()

    def go_round(self, rnd: random.Random) -> None:
        """Everything goes on a little."""
        self.world.now += 0.05
        self.world.end_commands()
        for host in self.world.hosts.values():
            for line in host.lines:
                line.deliver()
        for place in reversed(range(len(self.world.runners))):
            self.step_runner(rnd, place)
        for task in self.list_tasks():
            task.go_on()

    def pass_time(self, rnd: random.Random) -> None:
        self.world.now += rnd.choice([0.3, 1.0, 1.0, 3.0, 10.0, 40.0, 200.0])

    # People

    def choose_home(self, rnd: random.Random) -> Home:
        return rnd.choice(self.homes)

    def choose_id(self, home: Home, rnd: random.Random, *statuses: str) -> str:
        if not home.is_up:
            return ""
        ids = [job.id for job in home.service.store.state.jobs.values() if not statuses or job.status in statuses]
        return rnd.choice(ids[-12:]) if ids else ""

    def choose_user(self, rnd: random.Random) -> str:
        return rnd.choice(["", "", "", *USERS])

    def ask(self, home: Home, method: str, path: str, body: Any = None, user: str = "") -> tuple[int, Any]:
        """A request; one of a user changes no other's jobs."""
        before = dict(home.service.store.state.jobs) if home.is_up else {}
        status, reply = home.call(method, path, body, user)
        if user and home.is_up:
            after = home.service.store.state.jobs
            changed = [job for job_id, job in before.items() if after.get(job_id) is not job]
            joined = {job.group for job_id, job in after.items() if before.get(job_id) is not job}
            for job in changed:
                is_dependent = any(other.id in (*job.after, *job.after_any) for other in changed)
                is_dependent |= not joined.isdisjoint((*job.after_group, *job.after_any_group))
                if job.user != user and not is_dependent:
                    raise Violation(f"{user} has changed job {job.id} of {job.user}: {method} {path} {body}")
        return status, reply

    def add(self, rnd: random.Random) -> None:
        home, user = self.choose_home(rnd), self.choose_user(rnd)
        seconds = rnd.choice([0, 0, 1, 5, 60, 600])
        ways = rnd.choice(["", "", "", "stubborn", "polite", "leaves", "detaches"])
        body: dict[str, Any] = {"command": f"work {seconds} {rnd.choice([0, 0, 0, 1, 137])} {ways}".strip(),
                                "cwd": WORK_FOLDER, "gpus": rnd.choice([0, 1, 1, 1, 2, 0.5, 0.3, 1.5])}
        options: list[dict[str, Any]] = [
            {"retries": 2}, {"preemptible": True}, {"priority": rnd.randint(-2, 2)}, {"group": rnd.choice(["g", "h"])},
            {"timeout_seconds": 30}, {"name": "x"}, {"unique": True}, {"exclusive": True},
            {"max_concurrent": 1, "group": "g"}, {"begin": "+10s"}]
        for option in rnd.sample(options, rnd.choice([0, 0, 1, 1, 2])):
            body.update(option)
        parent = self.choose_id(home, rnd)
        if parent and rnd.random() < 0.2:
            body[rnd.choice(["after", "after_any"])] = parent
        if rnd.random() < 0.15:
            body[rnd.choice(["after_group", "after_any_group"])] = [rnd.choice(["g", "h"])]
        if rnd.random() < 0.15:
            command = body.pop("command")
            body["commands"] = [command] * rnd.randint(2, 5)
        self.ask(home, "POST", "/queue", body, user)

    def cancel(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        body: dict[str, Any] = {"ids": [self.choose_id(home, rnd, "pending", "running") or "ABC"]}
        if rnd.random() < 0.2:
            body = {"group": rnd.choice(["g", "h"])}
        self.ask(home, "POST", "/jobs/cancel", body, self.choose_user(rnd))

    def retry(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        self.ask(home, "POST", "/jobs/retry", {"ids": [self.choose_id(home, rnd) or "ABC"]}, self.choose_user(rnd))

    def clear(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        body = rnd.choice([{"ids": [self.choose_id(home, rnd, *nexus.FINAL) or "ABC"]}, {"group": "g"},
                           {"status": ["completed"]}])
        self.ask(home, "POST", "/jobs/clear", body, self.choose_user(rnd))

    def edit(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        change = rnd.choice([{"priority": rnd.randint(-2, 2)}, {"position": rnd.choice([0, -1])}, {"timeout_seconds": 20},
                             {"is_held": True}, {"is_held": home.is_damaged}, {"gpus": 1}, {"retries": 1},
                             {"group": rnd.choice(["g", "h", None])}, {"after_group": [rnd.choice(["g", "h"])]}])
        self.ask(home, "PATCH", f"/queue/{self.choose_id(home, rnd) or 'ABC'}", change, self.choose_user(rnd))

    def pause(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        verb, way = rnd.choice(["pause", "resume"]), rnd.randrange(3)
        path = f"/gpus/{rnd.randrange(4)}/{verb}" if way == 0 else f"/service/{verb}{'?group=g' if way == 1 else ''}"
        self.ask(home, "POST", path)

    def edit_file(self, rnd: random.Random) -> None:
        """Somebody edits `paused` in state.json."""
        home = self.choose_home(rnd)
        path, is_paused = home.layout.state_file, rnd.random() < 0.3
        try:
            text = nexus.read_text(home.disk, path) or ""
            other = text.replace(f'"paused": {json.dumps(not is_paused)}', f'"paused": {json.dumps(is_paused)}')
            if other != text:
                nexus.write_atomic(home.disk, path, [other])
        except nexus.NexusError:
            pass

    def start(self, rnd: random.Random) -> None:
        self.choose_home(rnd).start()

    def stop(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        if home.is_up:
            home.service.stop()

    def upgrade(self, rnd: random.Random) -> None:
        """Another nexus.py is copied over the one that is there, and mostly the service is restarted with it.

        If that cannot start, the former one does.
        """
        home = self.choose_home(rnd)
        former, version = versions.find_version(home.host), rnd.choice([*versions.VERSIONS])
        try:
            with home.disk.process.being_run():
                versions.copy_code(home.disk.process, version)
                if rnd.random() < 0.3:
                    return
                home.stop()
                home.start()
                if not home.is_up:
                    versions.copy_code(home.disk.process, former)
        except nexus.NexusError:            # there is no room for it
            return
        home.start()

    # Faults

    def kill_service(self, rnd: random.Random) -> None:
        self.choose_home(rnd).kill()

    def restart(self, rnd: random.Random) -> None:
        """A service is killed, and its supervisor starts it again at once."""
        home = self.choose_home(rnd)
        home.kill()
        home.start()

    def slow_runner(self, rnd: random.Random) -> None:
        """A job.sh gets no time for a while."""
        if self.world.runners:
            process, _ = rnd.choice(self.world.runners[-2:])
            process.slow_until = self.world.now + rnd.choice([2.0, 10.0, 40.0])

    def kill_at_effect(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        if home.process and home.process.is_alive:
            home.process.crash_in = rnd.choice([1, 2, 3, 5, 8, 13, 30])

    def kill_runner(self, rnd: random.Random) -> None:
        """A job.sh, or the screen around it, is killed from outside."""
        if self.world.runners:
            process, _ = rnd.choice(self.world.runners)
            screen = process.host.processes.get(process.parent)
            if screen and screen.name == "screen" and rnd.random() < 0.5:
                screen.end(128 + SIGKILL)
            else:
                for run in self.world.runs:
                    run.was_cut |= run.runner is process
                process.end(128 + SIGKILL)

    def kill_command(self, rnd: random.Random) -> None:
        runs = [run for run in self.world.runs if run.process.is_alive]
        if runs:
            rnd.choice(runs).process.end(128 + SIGKILL)

    def cut_power(self, rnd: random.Random) -> None:
        host = rnd.choice(list(self.world.hosts.values()))
        for home in self.homes:
            home.lost_power |= host is home.host
        host.cut_power()
        for home in self.homes:
            if host is home.host:
                home.disk = SimProcess(host, "shell").disk

    def fill_disk(self, rnd: random.Random) -> None:
        host = rnd.choice(list(self.world.hosts.values()))
        host.files.is_full = not host.files.is_full

    def protect_disk(self, rnd: random.Random) -> None:
        host = rnd.choice(list(self.world.hosts.values()))
        host.files.is_read_only = not host.files.is_read_only

    def flip_bit(self, rnd: random.Random) -> None:
        home = self.choose_home(rnd)
        folder = home.layout.journal_dir
        name = rnd.choice(STATE_NAMES)
        try:
            file = home.host.files.find(f"{folder}/{name}")
        except OSError:
            return
        if file.content:
            at = rnd.randrange(len(file.content))
            written = bytes(file.content)
            if "journal" in name:               # each line has its own checksum
                written = written[written.rfind(b"\n", 0, at) + 1:].partition(b"\n")[0]
            if b'"crc"' not in written:         # an older nexus wrote it: nobody can tell
                return
            file.content[at] ^= 1 << rnd.randrange(8)
            file.sync()
            home.is_damaged = True
            home.flipped.append(name)

    def trouble_cards(self, rnd: random.Random) -> None:
        """A card vanishes or comes back, changes its number, is used by somebody else; the driver fails, or is slow."""
        host = rnd.choice(list(self.world.hosts.values()))
        card, way = rnd.choice(host.cards), rnd.randrange(5)
        if way == 0:
            card.is_gone = not card.is_gone
        elif way == 1:
            other = rnd.choice(host.cards)
            card.index, other.index = other.index, card.index
        elif way == 2:
            if card.foreign and card.foreign.is_alive:
                card.foreign.end(0)
            else:
                card.foreign = SimProcess(host, "python", user="bob")
        elif way == 3:
            host.smi_s = 0.0 if host.smi_s else rnd.choice([1.0, 3.0, 12.0])
        else:
            host.smi_error = "" if host.smi_error else "nvidia-smi: Unable to determine the device handle"

    def trouble_slurm(self, rnd: random.Random) -> None:
        if self.world.cluster:
            self.world.cluster.trouble(rnd)

    def trouble_starts(self, rnd: random.Random) -> None:
        host = rnd.choice(list(self.world.hosts.values()))
        host.launch_error = 0 if host.launch_error else rnd.choice([errno.EAGAIN, errno.ENOMEM])

    def set_clock(self, rnd: random.Random) -> None:
        host = rnd.choice(list(self.world.hosts.values()))
        host.wall_offset += rnd.choice([-3600.0, -5.0, 5.0, 3600.0])

    def trouble_line(self, rnd: random.Random) -> None:
        """A line is cut, repeats a reply or loses it; a node cannot be reached; an agent is killed; a node lies."""
        nodes = [host for name, host in self.world.hosts.items() if name != "a"]
        if not nodes:
            return
        host, way = rnd.choice(nodes), rnd.randrange(6)
        lines = [line for line in host.lines if not line.is_cut]
        line = lines[-1] if lines else None
        if way == 0:
            host.is_reachable = not host.is_reachable
        if line is None:
            return
        if way in (0, 1):
            line.close()
        elif way == 2 and line.to_head:
            line.to_head.append(line.to_head[-1])
        elif way == 3 and line.to_head:
            line.to_head.pop()
        elif way == 4:
            line.process.end(128 + SIGKILL)
        elif way == 5 and line.to_head:
            line.to_head[-1] = line.to_head[-1].replace(b'"jobs"', rnd.choice([b'"job"', b'"jobs": 3, "x"']))


WEIGHTS: Mapping[str, int] = {
    "go_on": 60, "step_runner": 50, "go_round": 30, "deliver": 10, "pass_time": 12,
    "add": 20, "cancel": 4, "retry": 4, "clear": 2, "edit": 4, "pause": 3, "edit_file": 1, "start": 4, "stop": 1, "upgrade": 2,
    "kill_service": 2, "restart": 4, "slow_runner": 5, "kill_at_effect": 3, "kill_runner": 2, "kill_command": 1,
    "cut_power": 1, "fill_disk": 1, "protect_disk": 1, "flip_bit": 0, "trouble_cards": 2, "trouble_starts": 1,
    "set_clock": 1, "trouble_line": 4, "trouble_slurm": 3}


def make_steps(seed: int, count: int = STEPS) -> list[Step]:
    rnd = random.Random(seed)
    weights = dict(WEIGHTS)
    if seed % 5 == 0:
        weights["flip_bit"] = 2
    names = rnd.choices(list(weights), list(weights.values()), k=count)
    return [(name, rnd.getrandbits(32)) for name in names]


class Outcome:
    """How a history ended: "", or what did not hold."""

    def __init__(self, words: str, at: int, traceback: str = "") -> None:
        self.words, self.at, self.traceback = words, at, traceback


def run_history(setup: Setup, steps: Sequence[Step], tell: Callable[[str], None] | None = None) -> Outcome:
    """Run these steps, stop the faults, and see that all comes to its end.

    `tell` is given each step, and what the services and agents log.
    """
    with Patches():
        actions = Actions(setup)
        world = actions.world
        if tell:
            world.tell_log(tell)
        at = 0
        try:
            for home in actions.homes:
                home.start()
            for at, (name, number) in enumerate(steps, 1):
                if tell:
                    tell(f"{at:4} {world.now - 1000:9.2f} {name} {number}")
                world.end_commands()
                getattr(actions, name)(random.Random(number))
                if world.violations:
                    break
                if at % CHECK_INTERVAL == 0:
                    for home in actions.homes:
                        if home.is_up:
                            home.compare()
                            home.check_codes()
                            home.check_output()
                            home.check_groups()
                            home.check_reasons()
            if not world.violations:
                settle(actions)
        except Violation as violation:
            world.violations.append(str(violation))
        except Exception as error:          # of the simulator itself
            world.violations.append(f"{type(error).__name__}: {error}")
            world.tracebacks.append(traceback.format_exc())
        finally:
            world.close()
        words = world.violations[0] if world.violations else ""
        return Outcome(words, at, world.tracebacks[0] if world.tracebacks else "")


def settle(actions: Actions) -> None:
    """The faults stop: each job ends, each lease is free, nothing of a job is left, health is well."""
    world, rnd = actions.world, random.Random(0)
    if world.cluster:
        world.cluster.is_down = world.cluster.is_late = False
    for host in world.hosts.values():
        host.files.is_full = host.files.is_read_only = False
        host.smi_error, host.smi_s, host.launch_error, host.is_reachable = "", 0.0, 0, True
        for card in host.cards:
            card.is_gone = False
            if card.foreign:
                card.foreign.end(0)
    for home in actions.homes:
        if home.process:
            home.process.crash_in = 0
        home.start()
        if not home.is_up:                  # its nexus.py is too old
            versions.copy_code(home.disk.process, "this")
            home.start()
    world.is_hasty = True
    for run in world.runs:
        for process in run.left:
            if process.command:
                process.command.ends_at = min(process.command.ends_at, world.now + 1.0)
    give_up_at, resumed_at, pause_s = world.now + SETTLING_S, 0.0, 0.0
    longest_pause_s = 5.0 if actions.setup.nodes else 9.0       # a node that hears nothing for longer ends its agent
    while world.now < give_up_at:
        before = len(world.runs), len(world.runners)
        actions.go_round(rnd)
        if world.violations:
            return
        if world.now - resumed_at > 30:
            resumed_at = world.now
            for home in actions.homes:
                home.start()
                resume_all(home)
        if not world.runners and all(is_settled(home) for home in actions.homes):
            break
        pause_s = 0.0 if world.runners or before != (len(world.runs), len(world.runners)) else min(longest_pause_s, pause_s + 0.5)
        world.now += pause_s
    for home in actions.homes:
        if not home.is_up:
            raise Violation(f"the service does not start: {home.faults[-1:]}")
        waiting = [f"{job.id} ({job.status}: {explain(home, job.id)})"
                   for job in home.service.store.state.live.values()]
        waiting += [f"{job.id} ({job.status}: {explain(home, job.id)})"
                    for job in home.service.store.state.pending.values()]
        if waiting:
            raise Violation(f"not ended after {SETTLING_S / 3600:g} hours: {'; '.join(waiting)[:1500]}")
    for number in range(500):               # what is slow, or tried again, gets its time
        world.now += 1.5 if number < 200 else 9.0       # the next reading after a slow one comes much later
        actions.go_round(rnd)
        if number > 10 and not any(find_ill(home) for home in actions.homes):
            break
    for home in actions.homes:
        home.compare()
        home.check_codes()
        home.check_output()
        home.check_history()
        if find_ill(home):
            raise Violation(f"health is not well: {find_ill(home)}")
    for host in world.hosts.values():
        left = [process.mark for process in host.processes.values() if process.mark]
        if left:
            raise Violation(f"of jobs are left on {host.name}: {left}")
        for path, file in host.files.walk():
            if path.startswith(LEASE_FOLDER) and file.locks:
                raise Violation(f"a lease is not free: {path}")


def find_ill(home: Home) -> list[str]:
    """What is not well by GET /health; what was damaged stays so until a person has looked."""
    checks = home.call("GET", "/health")[1]["checks"]
    return [f"{row['name']}: {row['reading']}" for row in checks if not row["is_ok"]] if not home.is_damaged else []


def is_settled(home: Home) -> bool:
    return home.is_up and not home.service.store.state.live and not home.service.store.state.pending


def explain(home: Home, job_id: str) -> str:
    status, job = home.call("GET", f"/jobs/{job_id}")
    return str(job["reason"] if status == 200 else status)


def resume_all(home: Home) -> None:
    """A person resumes what is paused or held."""
    home.call("POST", "/service/resume")
    if not home.is_up:
        return
    state = home.service.store.state
    for group in list(state.groups):
        home.call("POST", f"/service/resume?group={group}")
    for uuid in list(state.paused_gpus):
        place = next((gpu.place for gpu in home.service.gpu_watch.all_gpus() if gpu.uuid == uuid), None)
        if place:
            home.call("POST", f"/gpus/{place}/resume")
    for job in list(state.pending.values()):
        if job.is_held and home.is_damaged:         # it may have begun: a person looks, and adds it again
            home.call("POST", "/jobs/cancel", {"ids": [job.id]})
        elif job.is_held and home.call("PATCH", f"/queue/{job.id}", {"is_held": False})[0] == 400:
            home.call("POST", "/jobs/cancel", {"ids": [job.id]})        # it asks for more than there is
        reason = home.call("GET", f"/jobs/{job.id}")[1].get("reason") or {}
        if reason.get("code") == "never":           # it was added while the cards were not known
            home.call("POST", "/jobs/cancel", {"ids": [job.id]})


def shorten(setup: Setup, steps: Sequence[Step], words: str, seconds: float = 60.0) -> list[Step]:
    """The shortest history found that still fails in the same way: pieces are left out, smaller and smaller ones."""
    import time
    kind, until = find_kind(words), time.monotonic() + seconds

    def fails(some: Sequence[Step]) -> bool:
        return find_kind(run_history(setup, some).words) == kind

    kept, size = list(steps), max(1, len(steps) // 2)
    while size and time.monotonic() < until:
        at = 0
        while at < len(kept) and time.monotonic() < until:
            shorter = kept[:at] + kept[at + size:]
            if fails(shorter):
                kept = shorter
            else:
                at += size
        size //= 2
    return kept


def find_kind(words: str) -> str:
    """A failure without its names and numbers."""
    return re.sub(r"[A-Za-z]{3}\b(?= )|\d+|\[.*|\(.*|:.*", "", words)[:60]

"""What a history is about: its setup, and each service's home, with what must hold of the state on its disk."""
from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from typing import Any

import versions
from world import HOME_FOLDER, LEASE_FOLDER, REAL_UID, SIGKILL, Crash, Host, SimProcess, SimStore, Task, Violation, World

import nexus

USERS = ("bob", "eve")              # who have tokens
HOOKS = ("on_finish", "on_group_finish", "on_idle", "on_unhealthy")
OWNER_TOKEN = "f" * 48
STATE_NAMES = ("state.json", "state.json.prev", "journal.jsonl", "journal.jsonl.prev")
FIRST_HOME, SECOND_HOME = f"{HOME_FOLDER}/.nexus", f"{HOME_FOLDER}/.nexus-b"


def choose_limits(seed: int) -> dict[str, float]:
    """Keys of [jobs] and [gpu] about how jobs end."""
    rnd = random.Random(f"limits {seed}")
    choices = {"kill_grace_seconds": [10, 10, 3, 30], "retries": [0, 0, 0, 1], "retry_backoff_seconds": [5, 5, 20],
               "timeout_seconds": [0, 0, 0, 400], "timeout_multiplier": [2, 2, 1.5], "idle_kill_minutes": [0, 0.5, 2],
               "max_memory_gb": [0, 4]}
    return {key: rnd.choice(values) for key, values in choices.items()}


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
        self.has_hooks = rnd.random() < 0.5
        self.is_calm = seed % 2 == 1                    # nothing goes wrong, and people ask for all that there is
        if self.is_calm:
            self.homes, self.has_two_heads, self.version = 1, False, "this"
        self.limits = choose_limits(seed)
        self.has_bad_card = self.is_calm and self.cards > 1 and seed % 3 == 0
        self.draw_room(random.Random(f"room {seed}"))

    def draw_room(self, rnd: random.Random) -> None:
        """Limits, and cards that differ.  Drawn by themselves: so a seed's other settings stay as they are."""
        self.max_running = rnd.choice([0, 0, 0, 3])
        self.reserve_after_s = rnd.choice([300, 300, 60, 20])
        self.models = [0] * 8                           # of the cards of each machine: MODELS of world.py
        self.is_cut = False                             # the first card is cut into slices
        self.exclusive_card = self.busy_card = -1       # it is in mode Exclusive_Process; it is nearly at its limit
        if self.is_calm and rnd.random() < 0.4:
            self.models, self.is_cut = [rnd.randrange(3) for _ in self.models], rnd.random() < 0.3
        elif self.is_calm and rnd.random() < 0.3:
            self.exclusive_card, self.busy_card = rnd.choice([-1, 0, 1]), rnd.choice([-1, 0, 1])

    @staticmethod
    def read(facts: Mapping[str, Any]) -> Setup:
        """The setup of a history that was kept."""
        setup = Setup(facts["seed"])
        setup.is_calm = setup.has_hooks = False         # as those were that are older
        setup.limits, setup.has_bad_card = {}, False
        setup.draw_room(random.Random(0))
        setup.max_running, setup.reserve_after_s = 0, 300
        vars(setup).update(facts)
        return setup


class Home:
    """A service's home, and what its callers were told."""

    def __init__(self, world: World, host: Host, path: str, setup: Any, uid: int = REAL_UID) -> None:
        self.world, self.host, self.path, self.uid = world, host, path, uid
        nodes = [{"name": f"n{number}", "host": f"n{number}"} for number in range(1, setup.nodes + 1)]
        self.config = nexus.parse_config({
            "gpu": {"lease_dir": LEASE_FOLDER},
            "hooks": {name: name for name in HOOKS} if setup.has_hooks else {},
            "state": {"history_limit": setup.history_limit},
            "jobs": {"launcher": setup.launcher, "on_reboot": setup.on_reboot,
                     "max_running_per_user": setup.max_running_per_user, "max_running": setup.max_running,
                     "reserve_after_seconds": setup.reserve_after_s, **setup.limits},
            **({"nodes": nodes} if nodes and (path == FIRST_HOME or setup.has_two_heads) else {})}, "config.toml")
        self.layout = nexus.make_layout(path, self.config)
        self.process: SimProcess | None = None
        self.store: SimStore | None = None          # of the last service
        self.is_damaged = False                     # a bit was flipped, or a power cut took what was not synced
        self.flipped: list[str] = []                # the files of which a bit was flipped
        self.lost_power = False                     # since that service
        self.power_cuts = 0
        self.faults: list[str] = []
        self.key = ""                               # of the request that is being sent: its Idempotency-Key
        shell = SimProcess(host, "shell")
        shell.uid = uid
        disk = self.disk = shell.disk
        disk.makedirs(path)
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
        process.home, process.uid = self, self.uid          # type: ignore[attr-defined]
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
        if self.key:
            headers["idempotency-key"] = self.key
        if body is not None:
            headers["content-type"] = "application/json"
        request = nexus.Request(method, path, {name: [text] for name, text in parameters.items()}, headers,
                                lambda: content, uid=None if user else self.uid, body_length=len(content))
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

    def ask(self, method: str, path: str, body: Any = None, user: str = "") -> tuple[int, Any]:
        """A request of somebody in the history, which the judges see; what they look at themselves is call()'s."""
        status, reply = self.call(method, path, body, user)
        self.world.judge("on_request", self, method, path, body, user, status, reply)
        return status, reply

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
            is_mixed = store.process.version == "older"     # it adds lines without checksums to those that have some
            if self.flipped[0].startswith("state.json") and lost and not self.lost_power and not is_mixed:
                raise Violation(f"a bit of {self.flipped[0]} was flipped, and jobs are lost: {sorted(lost)}")
            return
        if found.damage and self.lost_power and store.process.version == "older" and state.seq >= store.synced_seq:
            self.is_damaged = True          # its lines do not tell what a power cut may have taken of those before
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

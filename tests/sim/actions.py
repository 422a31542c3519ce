"""What may happen in a history: steps, and how often each of them comes."""
from __future__ import annotations

import errno
import json
import random
from collections.abc import Mapping
from typing import Any

import versions
from cluster import Cluster
from homes import FIRST_HOME, SECOND_HOME, STATE_NAMES, USERS, Home, Setup
from world import MODELS, SIGKILL, WORK_FOLDER, Crash, Host, SimProcess, Task, Violation, World

import nexus

Step = tuple[str, int]
STEPS = 200                         # of a history


class Actions:
    """What may happen: each method is the name of a step, with chance as its argument."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.world = setup, World(setup.seed)
        self.world.hosts["a"] = host = Host(self.world, "a", setup.cards, setup.version)
        for number in range(1, setup.nodes + 1):
            self.world.hosts[f"n{number}"] = Host(self.world, f"n{number}", 2)
        self.equip_hosts()
        if setup.launcher == "slurm":
            self.world.cluster = Cluster(self.world, host)
        self.homes = [Home(self.world, host, path, setup) for path in (FIRST_HOME, SECOND_HOME)[:setup.homes]]
        self.has_faults = True
        self.keyed: list[tuple[Home, Any, str, str]] = []      # (home, body, user, key) of requests that may be repeated
        self.jobs_read: tuple[Any, list[dict[str, Any]]] = ((), [])     # of Judge.read_jobs()
        if setup.has_bad_card:
            host.cards[-1].is_bad = True

    def equip_hosts(self) -> None:
        """Have the cards that the setup says."""
        for host in self.world.hosts.values():
            for number, card in enumerate(host.cards):
                card.name, card.memory_mib = MODELS[self.setup.models[number]]
                card.mode = "Exclusive_Process" if number == self.setup.exclusive_card else None
                card.load = 90.0 if number == self.setup.busy_card else card.load
            if self.setup.is_cut and host.name == "a":
                host.cards[:1] = host.cards[0].cut()

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
        self.world.rounds += 1
        self.world.end_commands()
        for host in self.world.hosts.values():
            for line in host.lines:
                line.deliver()
        for place in reversed(range(len(self.world.runners))):
            self.step_runner(rnd, place)
        for task in self.list_tasks():
            task.go_on()

    def pass_time(self, rnd: random.Random) -> None:
        seconds = rnd.choice([0.3, 1.0, 1.0, 3.0, 10.0, 40.0, 200.0])
        self.world.now += seconds
        if seconds > 3.0:
            self.world.jumped_at = self.world.now

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

    def ask(self, home: Home, method: str, path: str, body: Any = None, user: str = "", key: str = "") -> tuple[int, Any]:
        """A request; one of a user changes no other's jobs."""
        before = dict(home.service.store.state.jobs) if home.is_up else {}
        home.key = key
        status, reply = home.ask(method, path, body, user)
        home.key = ""
        if user and home.is_up:
            after = home.service.store.state.jobs
            changed = [job for job_id, job in before.items() if after.get(job_id) is not job]
            joined = {job.group for job_id, job in after.items() if before.get(job_id) is not job}
            joined |= {job.group for job in changed}        # and those that were left
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

    def submit(self, rnd: random.Random) -> None:
        """Somebody adds jobs with whatever decides when and where they start."""
        home, user = self.choose_home(rnd), self.choose_user(rnd)
        body: dict[str, Any] = {"command": f"work {rnd.choice([0, 1, 5, 20, 60, 200])} {rnd.choice([0, 0, 0, 1])}",
                                "cwd": WORK_FOLDER, "gpus": rnd.choice([0, 1, 1, 1, 2, 0.5, 0.3, 1.5])}
        group, parents = "k" if user else rnd.choice(["g", "h"]), [self.choose_id(home, rnd) for _ in range(rnd.randint(1, 2))]
        options: list[dict[str, Any]] = [
            {"priority": rnd.randint(1 if user else -1, 3)}, {"preemptible": True}, {"group": group}, {"is_held": True},
            {"group": group, "max_concurrent": rnd.randint(1, 2)}, {"begin": rnd.choice(["+5s", "+1m"])},
            {"expected_time": rnd.choice([0.5, 10, 300])}, {"retries": 2, "group": group}, {"after": parents}, {"after_any": parents},
            {"after_group": [group]}, {"after_any_group": [group]}, {"node": rnd.choice(list(self.world.hosts))}]
        if body["gpus"]:
            options += [{"gpu_ids": rnd.sample([0, 1, 2, 3], 2)}, {"gpu_type": rnd.choice(["h100", "A100", "3090", "full"])},
                        {"gpu_mem_mib": rnd.choice([500, 9000, 30000, 50000])}]
        for option in rnd.sample(options, rnd.choice([0, 1, 1, 2, 3])):
            body.update(option)
        if rnd.random() < 0.2:
            body["commands"] = [body.pop("command")] * rnd.randint(2, 4)
        self.ask(home, "POST", "/queue", body, user)

    def submit_limited(self, rnd: random.Random) -> None:
        """Somebody adds jobs that reach a limit, fail, print, are warned or have company; maybe with a key."""
        home, user = self.choose_home(rnd), self.choose_user(rnd)
        ways = ["prints", *rnd.sample(["saves", "idle", "naps", "forks", "polite", "stubborn", "leaves", "cuda", "oom",
                                       "eats=3000", "eats=5000"], rnd.choice([0, 1, 1, 2]))]
        code = 1 if "oom" in ways else rnd.choice([0, 0, 1, 139])
        body: dict[str, Any] = {"command": f"work {rnd.choice([0, 4, 30, 120, 600])} {code} {' '.join(sorted(ways))}",
                                "cwd": WORK_FOLDER, "gpus": rnd.choice([0, 0.5, 1, 1, 2])}
        options: list[dict[str, Any]] = [
            {"timeout_seconds": rnd.choice([10, 60, 0])}, {"expected_time": rnd.choice([10, 40])},
            {"timeout_seconds": 60, "warn": rnd.choice(["USR1@50s", "USR1@20s", "USR2@5s"])},
            {"retries": rnd.choice([1, 2, 3])}, {"retries": 3}, {"group": rnd.choice(["e", "f"])}, {"preemptible": True},
            {"unique": True, "env": rnd.choice([{}, {}, {"SEED": "1"}])}]
        for option in rnd.sample(options, rnd.choice([1, 2, 2, 3])):
            body.update(option)
        key = f"k{rnd.getrandbits(32):08x}" if rnd.random() < 0.3 else ""
        if rnd.random() < 0.1 and self.setup.is_calm and not self.setup.nodes and not key:
            body["cwd"] = f"{WORK_FOLDER}/{rnd.getrandbits(16):x}"
            home.disk.makedirs(body["cwd"])
        way = rnd.random()
        if way < 0.1:
            body.update(commands=[body.pop("command")] * 5, group=f"q{rnd.randrange(6)}", cwd=WORK_FOLDER)
            body["commands"] = ["work 1 1 prints"] * 5 if rnd.random() < 0.7 else body["commands"]
        elif way < 0.3 and self.setup.has_bad_card:
            del body["command"]
            body.update(commands=[f"work 1 0 cuda {way}" for way in ("polite", "saves", "prints")] * 3, gpus=1, cwd=WORK_FOLDER)
        elif body.get("unique"):
            body["command"], user = rnd.choice(["work 0 0 prints", "work 4 0 prints"]), ""
        elif way > 0.5:
            doing = rnd.choice(["polite", "polite", "stubborn", "forks", "forks stubborn", "saves", "naps", "naps"])
            body["command"] = f"work 600 0 {doing} prints"
            if doing == "saves":
                body.update(timeout_seconds=60, warn="USR1@50s")
            elif doing != "naps":
                body["timeout_seconds"] = 10
        if key:
            self.keyed.append((home, body, user, key))
        self.ask(home, "POST", "/queue", body, user, key)
        if body["cwd"] != WORK_FOLDER:
            home.disk.rmdir(body["cwd"])            # its command cannot be started

    def repeat(self, rnd: random.Random) -> None:
        """Somebody who is not sure of the answer sends a request again."""
        if self.keyed:
            home, body, user, key = rnd.choice(self.keyed[-6:])
            self.ask(home, "POST", "/queue", body, user, key)

    def kill(self, rnd: random.Random) -> None:
        """Somebody kills a running job, maybe with a signal of their choice."""
        home = self.choose_home(rnd)
        job_id, user = self.choose_id(home, rnd, "running") or "ABC", self.choose_user(rnd)
        if rnd.random() < 0.5:
            self.ask(home, "DELETE", f"/jobs/{job_id}", None, user)
        else:
            self.ask(home, "POST", "/jobs/cancel", {"ids": [job_id], "signal": rnd.choice(["INT", "TERM", "USR1"])}, user)

    def edit_limits(self, rnd: random.Random) -> None:
        """Somebody changes what ends a job, also of one that runs."""
        home = self.choose_home(rnd)
        change = rnd.choice([{"timeout_seconds": rnd.choice([5, 90, 0, None])}, {"retries": rnd.choice([0, 1, 3])},
                             {"expected_time": 30}, {"timeout_seconds": 70, "warn": "USR1@60s"}])
        job_id = self.choose_id(home, rnd, "pending", "running") or "ABC"
        self.ask(home, "PATCH", f"/queue/{job_id}", change, self.choose_user(rnd))

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

    # What decides who starts

    def fill(self, rnd: random.Random) -> None:
        """Long jobs for all the GPUs, of which some make room for others."""
        body = {"commands": [f"work {rnd.choice([100, 600])} 0"] * (self.setup.cards + 1), "cwd": WORK_FOLDER,
                "gpus": rnd.choice([1, 0.5]), "preemptible": rnd.random() < 0.7, "priority": rnd.randint(0, 2)}
        if rnd.random() < 0.3:
            body["gpu_mem_mib"] = rnd.choice([9000, 50000])
        self.ask(self.choose_home(rnd), "POST", "/queue", body)

    def run_again(self, rnd: random.Random) -> None:
        """What failed is run again, all or that of a group, as it was or otherwise."""
        body: dict[str, Any] = {"group": rnd.choice(["g", "h", "k"])} if rnd.random() < 0.7 else {"status": "failed"}
        if rnd.random() < 0.3:
            body["change"] = rnd.choice([{"group": rnd.choice(["g", "h"])}, {"priority": rnd.randint(0, 2)}, {"gpus": 1}])
        self.ask(self.choose_home(rnd), "POST", "/jobs/retry", body)

    def move(self, rnd: random.Random) -> None:
        """Jobs are moved before all others, behind them, or right before one."""
        home = self.choose_home(rnd)
        change = rnd.choice([{"position": 0}, {"position": -1}, {"before": self.choose_id(home, rnd, "pending") or "ABC"},
                             {"priority": rnd.randint(-1, 3)}])
        ids = list(dict.fromkeys(self.choose_id(home, rnd, "pending") or "ABC" for _ in range(rnd.choice([1, 1, 3]))))
        self.ask(home, "PATCH", "/queue", {"ids": ids, "change": change})

    def hold(self, rnd: random.Random) -> None:
        """A job, a group or a GPU is paused, or resumed."""
        home, group, place = self.choose_home(rnd), rnd.choice(["g", "h", "k"]), rnd.choice(["0", "1", "0.1", "n1:0"])
        job_id, verb = self.choose_id(home, rnd, "pending") or "ABC", rnd.choice(["pause", "resume"])
        way = rnd.randrange(3)
        if way == 0:
            self.ask(home, "PATCH", f"/queue/{job_id}", {"is_held": verb == "pause"})
        else:
            self.ask(home, "POST", f"/service/{verb}?group={group}" if way == 1 else f"/gpus/{place}/{verb}")

    def change(self, rnd: random.Random) -> None:
        """What was asked for of a job is changed, or of its group."""
        home = self.choose_home(rnd)
        parent = self.choose_id(home, rnd)
        change = rnd.choice([{"max_concurrent": rnd.choice([1, 2, None])}, {"gpu_type": rnd.choice(["a100", None])},
                             {"after": [parent]}, {"after_any": [parent]}, {"after_group": [rnd.choice("ghk")]},
                             {"gpus": rnd.choice([0.5, 1, 2])}, {"preemptible": rnd.random() < 0.5},
                             {"expected_time": rnd.choice([10, 300, None])}, {"gpu_ids": rnd.choice([[0, 1], None])}])
        self.ask(home, "PATCH", f"/queue/{self.choose_id(home, rnd, 'pending') or 'ABC'}", change)

    def use_card(self, rnd: random.Random) -> None:
        """Somebody else computes on a card, or ends that."""
        host = rnd.choice(list(self.world.hosts.values()))
        card = rnd.choice(host.cards)
        if card.is_used and card.foreign:
            card.foreign.end(0)
        else:
            card.foreign = SimProcess(host, "python", user="bob")

    def go_far(self, rnd: random.Random) -> None:
        """Everything goes on until nothing is left to do at once."""
        for _ in range(8):
            self.go_round(rnd)
            self.world.judge("after_step")
            self.world.now += 0.3

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
            home.power_cuts += host is home.host
        for run in self.world.runs:
            run.is_lost |= any(home.path == run.home and home.flipped and home.host is host for home in self.homes)
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
        self.world.has_moved = True

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


# Chance works on what goes wrong: kills, power cuts, full disks, cut lines.
WEIGHTS: Mapping[str, int] = {
    "go_on": 60, "step_runner": 50, "go_round": 30, "deliver": 10, "pass_time": 12,
    "add": 20, "submit_limited": 4, "repeat": 2, "kill": 1, "edit_limits": 1,
    "cancel": 4, "retry": 4, "clear": 2, "edit": 4, "pause": 3, "edit_file": 1, "start": 4, "stop": 1, "upgrade": 2,
    "kill_service": 2, "restart": 4, "slow_runner": 5, "kill_at_effect": 3, "kill_runner": 2, "kill_command": 1,
    "cut_power": 1, "fill_disk": 1, "protect_disk": 1, "flip_bit": 0, "trouble_cards": 2, "trouble_starts": 1,
    "set_clock": 1, "trouble_line": 4, "trouble_slurm": 3}
# Chance works on what people ask for, of services that do as they should.
CALM_WEIGHTS: Mapping[str, int] = {
    "go_on": 20, "step_runner": 10, "go_round": 90, "deliver": 5, "pass_time": 12,
    "add": 10, "submit": 20, "submit_limited": 16, "repeat": 2, "kill": 3, "edit_limits": 2,
    "cancel": 3, "retry": 4, "clear": 2, "edit": 4, "pause": 3, "restart": 1,
    "fill": 4, "run_again": 3, "move": 5, "hold": 7, "change": 5, "use_card": 1, "go_far": 6}

# Half of these: few jobs, which have the time to reach their limits.
LIMITED_WEIGHTS: Mapping[str, int] = {
    "go_on": 5, "step_runner": 5, "go_round": 130, "deliver": 5, "pass_time": 14, "submit": 3, "submit_limited": 14, "repeat": 2,
    "kill": 3, "edit_limits": 3, "retry": 3, "clear": 1, "restart": 2}


def make_steps(setup: Setup, count: int = STEPS) -> list[Step]:
    rnd = random.Random(setup.seed)
    calm = LIMITED_WEIGHTS if setup.seed % 4 == 3 else CALM_WEIGHTS
    weights = dict(calm if setup.is_calm else WEIGHTS)
    if setup.seed % 4 == 0 and not setup.is_calm:
        weights["flip_bit"] = 2
    names = rnd.choices(list(weights), list(weights.values()), k=count)
    return [(name, rnd.getrandbits(32)) for name in names]

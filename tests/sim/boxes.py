"""Several users on one box, each with a service of his own: what they run, what goes wrong, and what must hold of turns.

Time goes from one event to the next, and the services are those of the other histories.  What must hold is judged from
the truth alone: who has which GPU, whose jobs wait, and since when.
"""
from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable
from typing import Any

from history import Outcome
from homes import Home
from judges.judge import Judge
from world import HOME_FOLDER, LEASE_FOLDER, WORK_FOLDER, Crash, Host, Patches, Run, SimProcess, World

import nexus

NAMES = ("ann", "bob", "eve", "dan")
STARTING_S = 0.6                # in which a job begins once its GPU is free, with all that the box has to do
HEARD_S = 0.5                   # after which others know that somebody waits
LAPSE_S = 3.0                   # a GPU is unused for so long because of a turn, at most
SET_S = 30.0                    # and a complete set
FAULTLESS_S = 2.0               # who waits starts so soon after an end


class Stream:
    """What a user submits: `kind` backlog, light (less than a share), or large (jobs of several GPUs, one at a time)."""

    def __init__(self, rnd: random.Random, cards: int) -> None:
        self.kind = rnd.choice(["backlog", "backlog", "light", "large"] if cards > 1 else ["backlog", "backlog", "light"])
        shortest = rnd.choice([1.0, 2.0])
        self.lengths = shortest, shortest * rnd.choice([1.0, 2.0])
        self.gpus = rnd.randint(2, cards) if self.kind == "large" else 1
        self.begins_at = rnd.choice([0.0, 0.0, rnd.uniform(5, 60)])
        self.pause_s = rnd.uniform(1.0, 2.0) * self.lengths[1]          # of who does not want his whole share
        self.due_at = self.begins_at

    @property
    def longest_s(self) -> float:
        return self.lengths[1]


class Setup:
    """What such a history begins with.  The names are those that a Home asks for."""
    nodes, launcher, on_reboot, history_limit, max_running, max_running_per_user = 0, "direct", "fail", 100000, 0, 0
    has_hooks = has_two_heads = False

    def __init__(self, seed: int) -> None:
        rnd = random.Random(f"turns {seed}")
        self.seed, self.limits = seed, dict[str, float]()
        self.cards = rnd.choice([1, 1, 2, 2, 3, 4, 4, 8])
        self.count = rnd.choice([2, 2, 3, 4])
        self.reserve_after_s = rnd.choice([1.0, 1.0, 10.0])
        self.world = rnd.choice(["calm", "calm", "deaths", "stops", "old", "liar"])
        self.streams = [Stream(rnd, self.cards) for _ in range(self.count)]
        self.lies = rnd.choice(["wants", "collects", "holdings", "old wants"])
        self.lasts_s = 22 * max(stream.longest_s for stream in self.streams) + 40


class Person:
    """A user of the box."""

    def __init__(self, box: Box, number: int, stream: Stream) -> None:
        self.box, self.stream, self.name, self.uid = box, stream, NAMES[number], 2001 + number
        box.world.users[self.uid] = self.name
        self.home = Home(box.world, box.host, f"{HOME_FOLDER}/.nexus-{self.name}", box.setup, self.uid)
        self.is_old = self.is_liar = False      # its service takes no turns; or it only lies
        self.is_well = True                     # nothing has gone wrong with the service
        self.restarts_at = self.goes_on_at = 0.0
        self.asked: dict[int, float] = {}       # {GPUs of jobs that wait: since when}
        self.wanted: dict[int, float] = {}      # those that could start, as far as the service can do anything
        self.had_s = 0.0                        # GPU seconds, of all the time
        self.run_count = 0

    def start(self) -> None:
        self.home.start()
        if self.is_old and self.home.is_up:     # it knows nothing of turns
            taking = self.home.service.turn_taking
            if taking.bids:
                taking.bids.withdraw()
            taking.bids = taking.box = None

    def live(self, rnd: random.Random) -> None:
        """Submit what is due."""
        now, stream = self.box.passed_s, self.stream
        if not self.home.is_up or self.home.process.state == "T" or now < stream.due_at or now > self.box.setup.lasts_s:  # type: ignore
            return
        waiting = len(self.home.service.store.state.pending)
        stream.due_at = now + (1.0 if stream.kind == "backlog" else stream.pause_s)
        count = max(0, 20 - waiting) if stream.kind == "backlog" and waiting < 12 else int(stream.kind != "backlog" and not waiting)
        if count:
            commands = [f"work {rnd.uniform(*stream.lengths):.2f} 0" for _ in range(count)]
            status, reply = self.home.call("POST", "/queue", {"commands": commands, "cwd": WORK_FOLDER, "gpus": stream.gpus})
            assert status in (0, 200, 201), reply

    def note_wants(self) -> None:
        """Since when jobs wait that could start, as far as this user's service can do anything for them."""
        now, home = self.box.world.now, self.home
        is_able = home.is_up and home.process.state != "T"          # type: ignore[union-attr]
        is_able &= bool(home.is_up and home.service.observer.observation.gpus)
        sizes = {int(job.gpus) for job in home.service.store.state.pending.values()} if home.is_up else set()
        self.asked = {size: self.asked.get(size, now) for size in sizes}
        self.wanted = {size: self.wanted.get(size, now) for size in sizes if is_able}


class Liar:
    """A process that writes bids, and never takes a GPU."""

    def __init__(self, box: Box, uid: int, lies: str) -> None:
        self.box, self.lies = box, lies
        self.process = SimProcess(box.host, "liar")
        self.process.uid = uid
        self.due_at = 0.0
        self.bids = nexus.Bids(self.process.disk, LEASE_FOLDER, uid, self.process.clock)

    def live(self, rnd: random.Random) -> None:
        world = self.box.world
        if world.now < self.due_at or not self.box.has_folder():
            return
        self.due_at = world.now + 1.0
        uuids, now = tuple(card.uuid for card in self.box.host.cards), self.box.host.wall()
        many, one = rnd.randint(1, len(uuids)), nexus.Want(1, uuids, 10**6, 0.0, True)
        wants = {"wants": (one,), "collects": (nexus.Want(len(uuids), uuids, 9, 0.0, True),),
                 "holdings": (one,), "old wants": (nexus.Want(many, uuids, 1, 0.0, rnd.random() < 0.5), one)}[self.lies]
        holdings = tuple(nexus.Holding(uuid, 100, now - 1e6) for uuid in uuids) if self.lies == "holdings" else ()
        with self.process.being_run():
            self.bids.tell(nexus.Bid(wants, holdings, 0.0, rnd.choice([0.0, 1e9]), 0, 10**6))


class Box:
    """A machine, its users, and what is seen of them."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.rnd = setup, random.Random(setup.seed)
        self.world = World(setup.seed)
        self.world.hosts["a"] = self.host = Host(self.world, "a", setup.cards)
        self.people = [Person(self, number, stream) for number, stream in enumerate(setup.streams)]
        self.liar: Liar | None = None
        if setup.world == "old":
            self.people[-1].is_old = True
        if setup.world == "liar":
            self.people[-1].is_liar = True
            self.liar = Liar(self, self.people[-1].uid, setup.lies)
        self.truth = Truth(self)

    @property
    def passed_s(self) -> float:
        return self.world.now - 1000.0

    def has_folder(self) -> bool:
        return nexus.is_folder(self.people[0].home.disk, LEASE_FOLDER)

    def find_person(self, run: Run) -> Person:
        return next(person for person in self.people if person.home.path == run.home)

    def list_due(self) -> list[Any]:
        return [task for process in list(self.host.processes.values()) if process.state != "T"
                for task in process.tasks if task.is_due()]

    def find_next(self) -> float:
        """When something happens next."""
        at = [task.until for process in self.host.processes.values() if process.state != "T" for task in process.tasks]
        at += [process.command.ends_at for process in self.host.processes.values() if process.command]
        at += [1000.0 + person.stream.due_at for person in self.people if person.home.is_up]
        return min(at, default=self.world.now + 1.0)

    def go_on(self) -> None:
        """The next event, and what it makes others do."""
        world = self.world
        pause_s = 0.0 if self.list_due() else min(0.5, max(0.0, self.find_next() - world.now))
        world.now += pause_s + self.rnd.choice([0.001, 0.005, 0.02])
        world.end_commands()
        self.step_runners()
        tasks = self.list_due()
        self.rnd.shuffle(tasks)
        for task in tasks:
            task.go_on()
        for person in self.people:
            if not person.is_liar:
                person.live(self.rnd)
        if self.liar:
            self.liar.live(self.rnd)
        self.go_wrong()

    def step_runners(self) -> None:
        """Each job.sh goes on until it waits."""
        world = self.world
        for process, steps in list(world.runners):
            is_over = not process.is_alive
            try:
                while not is_over:
                    with process.being_run():
                        name = next(steps, "")
                        is_over = steps.gi_frame is None        # type: ignore[attr-defined]
                    if name == "command runs":
                        break
            except Crash:
                is_over = True
            if is_over:
                process.end(0)
                world.runners.remove((process, steps))

    def go_wrong(self) -> None:
        """Services die, and come again; or they are stopped for a while."""
        now, rnd = self.passed_s, self.rnd
        for person in self.people:
            if person.is_liar:
                continue
            if person.restarts_at and now >= person.restarts_at:
                person.restarts_at = 0.0
                person.start()
            process = person.home.process
            if person.goes_on_at and now >= person.goes_on_at and process:
                person.goes_on_at, process.state = 0.0, "S"
            if self.setup.world not in ("deaths", "stops") or rnd.random() > 0.002 or not person.home.is_up:
                continue
            person.is_well = False
            if self.setup.world == "deaths":
                person.home.kill()
                person.restarts_at = now + rnd.choice([0.5, 5.0, 30.0])
            elif process and not person.goes_on_at:
                process.state, person.goes_on_at = "T", now + rnd.choice([1.0, 5.0, 40.0])


class Wait:
    """A user waits who had nothing to do before."""

    def __init__(self, gpus: int, since: float, is_plain: bool) -> None:
        self.gpus, self.since = gpus, since
        self.ends: list[float] = []             # of others' jobs since then
        self.is_plain = is_plain                # nobody has had less, nor asks for several GPUs


class Truth(Judge):
    """What users see: who has which GPU, who waits, and for how long."""

    def __init__(self, box: Box) -> None:
        self.box, self.world, self.setup = box, box.world, box.setup
        self.looked_at = box.world.now
        self.free_since = {card.uuid: 0.0 for card in box.host.cards}
        self.live: list[Run] = []
        self.waits: dict[Person, Wait] = {}
        self.pairs: dict[tuple[Person, Person], tuple[float, float, float]] = {}      # since when, what each had then
        self.contested_s: dict[Person, float] = {}          # GPU seconds while somebody else waited
        self.idle_s = 0.0                                   # GPU seconds that were left to nobody while somebody wanted them
        self.unused: list[tuple[float, str, float]] = []    # (until when, which GPU, for how long) somebody honest wanted it
        self.collected_at = 0.0                             # when GPUs were collected last

    def on_begin(self, run: Run) -> None:
        self.live.append(run)
        wanting = [person.wanted[1] for person in self.box.people if 1 in person.wanted and not person.is_old]
        for uuid in run.shares:
            free_since = self.free_since.pop(uuid, self.world.now)
            if wanting:
                self.unused.append((self.world.now, uuid, max(0.0, self.world.now - max(free_since, min(wanting)) - STARTING_S)))
        person = self.box.find_person(run)
        person.run_count += 1
        self.waits.pop(person, None)

    def on_end(self, run: Run) -> None:
        if run in self.live:
            self.live.remove(run)
            self.free_since.update({uuid: self.world.now for uuid in run.shares
                                    if not any(uuid in other.shares for other in self.live)})
            person = self.box.find_person(run)
            for other, wait in self.waits.items():
                if other is not person and self.world.now - wait.since > HEARD_S:
                    wait.ends.append(self.world.now)

    def see(self) -> None:
        """After each event."""
        now, people = self.world.now, self.box.people
        passed_s, self.looked_at = now - self.looked_at, now
        wanting = [person for person in people if person.wanted]
        for run in self.live:
            person, used_s = self.box.find_person(run), sum(run.shares.values()) / 100 * passed_s
            person.had_s += used_s
            if any(other is not person for other in wanting):
                self.contested_s[person] = self.contested_s.get(person, 0.0) + used_s
        if wanting:
            self.idle_s += passed_s * sum(now - since > STARTING_S for since in self.free_since.values())
        for person in people:
            before = dict(person.wanted)
            person.note_wants()
            if person.wanted and not before:
                others = [self.contested_s.get(other, 0.0) for other in people if other is not person]
                is_least = person.had_s <= min(other.had_s for other in people if other is not person)
                self.waits[person] = Wait(min(person.wanted), now, is_least and self.contested_s.get(person, 0.0) <= min(others))
            elif before and not person.wanted:
                self.waits.pop(person, None)
        self.check_idle(now)
        self.check_waits(now)
        self.check_shares(now)
        self.check_large(now)

    def count_ill(self) -> int:
        """How many users let turns lapse."""
        return sum(not person.is_well or person.is_liar or person.is_old for person in self.box.people)

    def is_kept(self, uuid: str) -> bool:
        """Whether a service that was stopped while it started a job still has the lease."""
        host = self.box.host
        if not any(process.state == "T" for process in host.processes.values()):
            return False
        with contextlib.suppress(FileNotFoundError):
            return bool(host.files.find(f"{LEASE_FOLDER}/{uuid}").locks)
        return False

    def check_idle(self, now: float) -> None:
        """No GPU is unused for long while somebody wants it, unless it is collected."""
        free = sorted(since for uuid, since in self.free_since.items() if not self.is_kept(uuid))
        if not free:
            return
        setup = self.setup
        collected = [size for person in self.box.people for size, since in person.asked.items()
                     if size > 1 and now - since >= setup.reserve_after_s]
        if self.box.liar:
            return
        if collected:
            self.collected_at = now
        is_collected = any(size > len(free) for size in collected)
        for person in self.box.people:
            for size, since in person.wanted.items():
                if is_collected or size > len(free) or person.is_old:
                    continue
                limit_s = (SET_S if collected else 0.0) + LAPSE_S * max(1, self.count_ill()) + STARTING_S
                idle_s = now - max(free[size - 1], since, 0.0 if collected else self.collected_at)
                if idle_s > limit_s:
                    self.fail(f"{len(free)} GPUs are unused for {idle_s:.1f} s, and {person.name} wants {size}")

    def check_waits(self, now: float) -> None:
        """Who comes is the next, or the one after each other user has had two turns: who comes late may be ahead by a job.

        Where that was a long one, others have as many short ones as take its time.
        """
        longest_s = max(person.stream.longest_s for person in self.box.people)
        for person, wait in self.waits.items():
            others = 2 * (len(self.box.people) - 1)
            wait.is_plain &= not any(size > 1 for other in self.box.people for size in other.asked if other is not person)
            if not wait.is_plain or wait.gpus > 1 or self.count_ill() or len(wait.ends) < others:
                continue
            late_s = now - wait.ends[others - 1]
            if late_s > FAULTLESS_S and now - wait.since > len(self.box.people) * longest_s + FAULTLESS_S:
                self.fail(f"{person.name} waits since {wait.since - 1000:.1f}, {len(wait.ends)} jobs of others have ended, "
                          f"the last one that may come before {late_s:.1f} s ago")

    def check_shares(self, now: float) -> None:
        """Those who want GPUs at the same time have as much."""
        people = [person for person in self.box.people if 1 in person.wanted]
        pairs = {(one, other): max(one.wanted[1], other.wanted[1]) for number, one in enumerate(people) for other in people[:number]}
        self.pairs = {pair: self.pairs.get(pair, (0.0, 0.0, 0.0)) for pair in pairs}
        for (one, other), since in pairs.items():
            began, one_s, other_s = self.pairs[one, other]
            if began != since:
                self.pairs[one, other] = since, one.had_s, other.had_s
                continue
            longest_s = max(one.stream.longest_s, other.stream.longest_s)
            if now - since < 20 * longest_s or any(person.is_old or person.is_liar or not person.is_well for person in (one, other)):
                continue
            had = one.had_s - one_s, other.had_s - other_s
            # Who was there may be ahead or behind by a job when the other comes, and by another one later; on eight GPUs by
            # two: so many begin at once before it is known how long each user's jobs take.  Who loses patience first with
            # one that lies has all GPUs.
            more_s = longest_s * (self.setup.cards + 3 if self.box.liar else max(1, self.setup.cards // 4))
            if abs(had[0] - had[1]) > max(0.1 * max(had), longest_s) + more_s + STARTING_S:
                self.fail(f"{one.name} had {had[0]:.1f} GPU seconds and {other.name} {had[1]:.1f} since {since - 1000:.1f}, "
                          f"with jobs of at most {longest_s:g} s")

    def check_large(self, now: float) -> None:
        """Who waits for several GPUs has them, when those jobs have ended that run, and those before him have had theirs."""
        longest_s = max(person.stream.longest_s for person in self.box.people)
        for person in self.box.people:
            size, since = next(iter(person.wanted.items()), (1, now))
            waits_s = now - since - self.setup.reserve_after_s
            if size == 1 or waits_s < longest_s or self.count_ill():
                continue
            others = [other for other in self.box.people if other is not person]
            # What the job before this one has had, others have first: who wanted nothing before that had earned nothing.
            own_s = size * person.stream.longest_s if person.stream.pause_s < 2 * person.stream.longest_s else 0.0
            ahead_s = max(own_s, *(self.contested_s.get(person, 0.0) - self.contested_s.get(other, 0.0) for other in others))
            large = sum(other.stream.gpus > 1 for other in others)
            limit_s = 2 * (large + 1) * longest_s + 5.0 + ahead_s * len(others) / self.setup.cards
            if waits_s > limit_s:
                self.fail(f"{person.name} waits for {size} GPUs since {since - 1000:.1f}, for {waits_s:.1f} s after reserve_after_seconds")


    def check_lies(self) -> None:
        """Who lets turns lapse costs others little; what is left to who collects and never takes counts as his."""
        setup, people = self.setup, self.box.people
        if not self.box.liar or any(person.stream.gpus > 1 for person in people if not person.is_liar):
            return
        lost_s = sum(lost for *_, lost in self.unused)
        if setup.lies in ("wants", "holdings") and find_most_unused(self) > LAPSE_S + STARTING_S + HEARD_S:
            self.fail(f"a GPU is unused for {find_most_unused(self):.1f} s in a minute, for who wants it and never takes it")
        if lost_s > setup.cards * max(SET_S, setup.lasts_s / setup.count) + 60:        # once, or his share
            self.fail(f"{lost_s:.0f} GPU seconds are lost to who never takes them")


def find_most_unused(truth: Truth) -> float:
    """The most seconds in one minute that one GPU was unused."""
    return max((sum(span for other_at, other, span in truth.unused if other == uuid and at - 60 < other_at <= at)
                for at, uuid, span in truth.unused if span), default=0.0)


def run_box(setup: Setup, tell: Callable[[str], None] | None = None) -> Outcome:
    """Let the users of a box do what they do, and judge it."""
    with Patches():
        box = Box(setup)
        world, rounds = box.world, 0
        if tell:
            world.tell_log(lambda words: tell(f"{box.passed_s:9.2f} {words.strip()}"))
        try:
            world.judges = [box.truth]
            for person in box.people:
                if not person.is_liar:
                    person.start()
            while box.passed_s < setup.lasts_s and not world.violations:
                rounds += 1
                box.go_on()
                box.truth.see()
            box.truth.check_lies()
        except Exception as error:
            world.violations.append(f"{type(error).__name__}: {error}")
            world.tracebacks.append(traceback.format_exc())
        finally:
            world.close()
        return Outcome(world.violations[0] if world.violations else "", rounds, world.tracebacks[0] if world.tracebacks else "")

"""What nexus holds by itself after failures: the rest of a group whose first jobs all fail at once, and a bad GPU."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from judges.judge import Judge

if TYPE_CHECKING:
    from homes import Home

    import nexus

QUICK_S, FIRST = 10.0, 3        # `guard_seconds`; how many jobs of a group
FAILURES = 3                    # `guard_failures`
BY_ITSELF = ("exit", "signal", "cuda-oom")
FINAL = ("completed", "failed", "cancelled")


class GroupEnds:
    """How the first jobs of a group have ended."""

    def __init__(self) -> None:
        self.quick: list[bool] = []         # whether each has failed within seconds
        self.is_clear = True                # nobody has paused or resumed it, and none of these jobs is forgotten


class Guards(Judge):
    """In calm histories: elsewhere a service that is killed has forgotten the failures on a GPU."""

    def __init__(self, actions: Any) -> None:
        super().__init__(actions)
        self.former: nexus.State | None = None
        self.groups: dict[str, GroupEnds] = {}
        self.ended: list[tuple[nexus.Job, nexus.Attempt]] = []      # all attempts, as they ended
        self.is_touched = False                                     # somebody has paused or resumed a GPU
        self.is_judged = self.setup.is_calm and self.setup.launcher != "slurm"

    def on_request(self, home: Home, method: str, path: str, body: Any, user: str, status: int, reply: Any) -> None:
        if path.startswith("/service/") and "group=" in path:
            self.groups.setdefault(path.rpartition("=")[2], GroupEnds()).is_clear = False
        self.is_touched |= path.startswith("/gpus/")

    def after_step(self) -> None:
        home = self.homes[0]
        if not self.is_judged or not home.is_up or home.service.store.state is self.former:
            return
        states = list(home.service.store.states)
        at = next((number for number, state in enumerate(states) if state is self.former), len(states) - 2)
        for state in states[max(at + 1, 0):]:
            if self.former:
                self.compare(self.former, state)
            self.former = state

    def compare(self, former: nexus.State, state: nexus.State) -> None:
        """Look at what one change of the state has brought."""
        changed = [(former.jobs.get(job_id), job) for job_id, job in state.jobs.items() if former.jobs.get(job_id) is not job]
        ended = [job for before, job in changed if before and before.status == "running" and job.status != "running"]
        if former.jobs.keys() - state.jobs.keys():          # a group without jobs is forgotten
            groups = {job.group for job in state.jobs.values()}
            self.groups = {name: ends for name, ends in self.groups.items() if name in groups}
        # Which of those that ended at one moment came first is not known
        self.ended += [(job, job.attempts[-1]) for job in sorted(ended, key=lambda job: job.status != "completed")]
        for job in ended:
            if job.group and job.status in ("failed", "completed"):
                self.groups.setdefault(job.group, GroupEnds()).quick.append(job.status == "failed" and is_quick(job.attempts[-1]))
            if job.group and job.status == "failed" and job.attempts[-1].cause not in BY_ITSELF:
                self.groups[job.group].is_clear = False         # whether a limit counts as a failure is not said
        for before, job in changed:
            group = former.groups.get(job.group or "")
            if before and before.status == "pending" and job.status == "running" and group and group.hold:
                self.fail(f"job {job.id} starts, and its group {group.name} is held: {group.hold}")
        for name in {job.group for job in ended if job.group}:
            self.check_group(former, state, name)
        for uuid, reason in state.pause_reasons:
            if (uuid, reason) not in former.pause_reasons:
                self.check_paused_gpu(state, uuid, reason)

    def check_group(self, former: nexus.State, state: nexus.State, name: str) -> None:
        """If the first three jobs of a group all fail within seconds, the rest is held; else nothing is."""
        ends, group = self.groups.setdefault(name, GroupEnds()), state.groups.get(name)
        has_rest = any(job.group == name and job.id in former.pending for job in state.pending.values())     # not one that ran
        is_held = bool(group and group.hold)
        if not ends.is_clear:
            return
        if is_held and (len(ends.quick) < FIRST or not all(ends.quick[:FIRST])):
            self.fail(f"group {name} is held, and of its first jobs these failed at once: {ends.quick[:FIRST]}")
        if len(ends.quick) == FIRST and all(ends.quick) and has_rest and not is_held:
            self.fail(f"the first {FIRST} jobs of group {name} have failed at once, and the rest is not held")
        ends.is_clear = len(ends.quick) < FIRST         # what holds it again later is not said

    def find_latest(self, uuid: str) -> Iterator[tuple[nexus.Job, nexus.Attempt]]:
        """The quick failures on a GPU since anything else ended there, the latest first."""
        for job, attempt in reversed(self.ended):
            if attempt.cause == "killed" and attempt.pid is None:       # it never began
                continue
            if attempt.gpu_uuids == (uuid,) or (uuid in attempt.gpu_uuids and attempt.cause is None):
                if attempt.cause is None or not is_quick(attempt):
                    return
                yield job, attempt

    def check_paused_gpu(self, state: nexus.State, uuid: str, reason: str) -> None:
        """A GPU is paused after so many quick failures in a row, of two commands at least, if jobs do well on another."""
        latest = list(self.find_latest(uuid))
        since = min((attempt.started_at or 0.0 for _, attempt in latest), default=0.0)
        good = [job.id for job, attempt in self.ended if attempt.cause is None and uuid not in attempt.gpu_uuids
                and attempt.gpu_uuids and (attempt.started_at or 0.0) >= since]
        if len(latest) < FAILURES or len({job.command for job, _ in latest}) < 2 or not good:
            self.fail(f"{uuid} is paused ({reason}) after the failures {[job.id for job, _ in latest]}, "
                      f"and since then {good} did well elsewhere")
        cards = {card.uuid for card in self.homes[0].host.cards}
        if cards and cards <= {*state.paused_gpus} and self.setup.nodes == 0:
            self.fail(f"{uuid} is paused, and it was the last")

    def look(self) -> None:
        if self.is_judged and self.former and not self.is_touched and len(self.world.machines_begun_at) == 1:
            for card in self.homes[0].host.cards:
                self.check_bad_gpu(self.former, card.uuid)

    def check_bad_gpu(self, state: nexus.State, uuid: str) -> None:
        """A GPU on which the same programs fail that have done well on another, and fail nowhere else, is paused."""
        streak = list(self.find_latest(uuid))
        latest, since = streak[:FAILURES], min((attempt.started_at or 0.0 for _, attempt in streak), default=0.0)
        programs = {find_program(job) for job, _ in latest}
        last = max((at for at, (_, attempt) in enumerate(self.ended) if uuid in attempt.gpu_uuids), default=0)
        elsewhere = [(find_program(job), attempt) for job, attempt in self.ended[:last]     # it is looked at when a job ends there
                     if uuid not in attempt.gpu_uuids and (attempt.started_at or 0.0) >= since]
        good = {program for program, attempt in elsewhere if attempt.cause is None and attempt.gpu_uuids}
        bad = {program for program, attempt in elsewhere if attempt.cause is not None}
        others = [card for card in self.homes[0].host.cards if card.uuid != uuid and card.uuid not in state.paused_gpus]
        is_due = programs <= good - bad and len({job.command for job, _ in latest}) > 1 and others
        if len(latest) == FAILURES and is_due and uuid not in state.paused_gpus:
            self.fail(f"the jobs {[job.id for job, _ in latest]} failed at once on {uuid}, such jobs do well elsewhere, "
                      "and it is not paused")


def is_quick(attempt: nexus.Attempt) -> bool:
    return attempt.cause in BY_ITSELF and (attempt.runtime_seconds or 0.0) <= QUICK_S


def find_program(job: nexus.Job) -> str:
    """A sweep's jobs are of one program: its name, and the script."""
    return " ".join(job.command.split()[:2])

"""Histories: what happens to the machines, as a list of steps, and what must hold after each.

A step is [name, number]: what it does follows from the number and from what there is then.  So a history with some of
its steps left out is a history too, and the shortest one that still fails can be looked for.
"""
from __future__ import annotations

import random
import re
import traceback
from collections.abc import Sequence
from typing import Callable

import versions
from actions import Actions, Step, make_steps
from homes import Home, Setup
from judges import make_judges
from world import LEASE_FOLDER, Patches, Violation

__all__ = ["Setup", "make_steps", "run_history", "shorten"]

CHECK_INTERVAL = 20                 # State is read back from the disk after so many steps
SETTLING_S = 4 * 3600.0             # once the faults stop, all must have ended in this time


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
            world.judges = make_judges(actions)
            for home in actions.homes:
                home.start()
            for at, (name, number) in enumerate(steps, 1):
                if tell:
                    tell(f"{at:4} {world.now - 1000:9.2f} {name} {number}")
                world.end_commands()
                getattr(actions, name)(random.Random(number))
                world.judge("after_step")
                if at % CHECK_INTERVAL == 0 and not world.violations:
                    look(actions)
                if world.violations:
                    break
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


def look(actions: Actions) -> None:
    for home in actions.homes:
        if home.is_up:
            home.compare()
    actions.world.judge("look")


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
        world.judge("after_step")
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
    look(actions)
    world.judge("on_settled")
    for home in actions.homes:
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
    home.ask("POST", "/service/resume")
    if not home.is_up:
        return
    state = home.service.store.state
    for group in list(state.groups):
        home.ask("POST", f"/service/resume?group={group}")
    for uuid in list(state.paused_gpus):
        place = next((gpu.place for gpu in home.service.gpu_watch.all_gpus() if gpu.uuid == uuid), None)
        if place:
            home.ask("POST", f"/gpus/{place}/resume")
    reasons = {row["id"]: row["reason"] or {} for row in home.call("GET", "/queue?fields=id,reason")[1]} if state.pending else {}
    for job in list(state.pending.values()):
        if job.is_held and home.is_damaged:         # it may have begun: a person looks, and adds it again
            home.ask("POST", "/jobs/cancel", {"ids": [job.id]})
        elif job.is_held and home.ask("PATCH", f"/queue/{job.id}", {"is_held": False})[0] == 400:
            home.ask("POST", "/jobs/cancel", {"ids": [job.id]})        # it asks for more than there is
        if reasons.get(job.id, {}).get("code") == "never":           # it was added while the cards were not known
            home.ask("POST", "/jobs/cancel", {"ids": [job.id]})


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

"""Nothing waits that could start, and who has waited for long gets the GPUs that become free."""
from __future__ import annotations

from typing import TYPE_CHECKING

from homes import Home
from world import WORK_FOLDER

import nexus
from judges.conditions import list_holds
from judges.ledger import Job, Ledger, Move
from judges.limits import CPU_SLOTS, list_excess
from judges.order import comes_before, is_known
from judges.preempting import FIRST_S
from judges.room import Room, find_shares

if TYPE_CHECKING:
    from judges.starts import Starts

SOON_S = 3.0            # a service looks at all that waits that often, whatever it hears


def check_waiting(starts: Starts) -> None:
    """No job waits for which there is room while nothing changes, and its service has gone on."""
    if starts.setup.launcher == "slurm" or starts.world.violations:
        return
    for home in starts.list_homes():
        state = home.service.store.state
        seen = state.seq, starts.world.now // 5.0
        if not state.pending or starts.looked_at.get(home.path) == seen or is_busy(home):
            continue
        starts.looked_at[home.path] = seen
        check_home(starts, home, state)


def is_busy(home: Home) -> bool:
    """Whether something is due that a service does."""
    process = home.process
    return process is None or any(task.is_due() for task in process.tasks)


def check_home(starts: Starts, home: Home, state: nexus.State) -> None:
    ledger, now = starts.ledgers[home.path], home.host.wall()
    live = list(state.live.values())
    open_jobs = [job for job in state.pending.values() if is_open(starts, ledger, state, job, now, live)]
    if not open_jobs or any(job.current.stop_cause for job in live):
        return                          # what ends now makes room for who comes first
    room = Room(starts.world, live, state.paused_gpus, starts.used_at)
    is_kept = any(job.gpus and find_wait_s(job, now) >= starts.setup.reserve_after_s - SOON_S for job in open_jobs)
    doubts = {}
    for job in open_jobs:
        words = ""
        if not job.gpus:
            if sum(not other.gpus and not other.current.node for other in live) < CPU_SLOTS and not job.only_node:
                words = "a slot is free"
        elif not is_kept or len(open_jobs) == 1:
            if cards := room.find_fit(job, [""]):
                words = f"{cards} are free"
            elif not is_kept and not job.preemptible:
                words = find_who_makes_room(room, job, live, now)
        if words:
            since = doubts[job.id, state.seq] = starts.doubts.get((job.id, state.seq), starts.world.now)
            if home.process and home.process.looked_at >= since + SOON_S:
                starts.fail(f"job {job.id} waits, and {words}")
    starts.doubts = doubts


def is_open(starts: Starts, ledger: Ledger, state: nexus.State, job: Job, now: float, live: list[Job]) -> bool:
    """Whether all that is asked for has been so for a while, but for the room."""
    if job.status != "pending" or job.excluded_nodes or not is_known(ledger, job) or job.cwd != WORK_FOLDER:
        return False
    return (not list_holds(ledger, state, job, now - SOON_S)
            and not list_excess(starts, ledger, state, job, [*live, job]))


def find_who_makes_room(room: Room, job: Job, live: list[Job], now: float) -> str:
    """The preemptible jobs that can make room for a job; "": none."""
    others = [one for one in live if one.preemptible and one.gpus and not one.current.node
              and now - (one.current.started_at or now) > FIRST_S + SOON_S]
    is_enough = others and room.without(others).find_fit(job, [""])
    return f"{[one.id for one in others]} could make room for it" if is_enough else ""


def find_wait_s(job: Job, now: float) -> float:
    """How long a job has waited since it was added, or queued again."""
    return float(now - job.status_history[-1][1])


def check_reserved(starts: Starts, ledger: Ledger, move: Move) -> None:
    """A card that is free is kept for the first job that has waited for so long; others get it if they end in time."""
    if not starts.setup.is_calm or starts.setup.launcher == "slurm" or not any(job.gpus for job in move.started):
        return
    live = list(move.after.live.values())
    first = find_starving(starts, ledger, move, live)
    if first is None or any(job.current.stop_cause == "preempted" for job in live):     # which may make room for it
        return
    node = first.only_node or ""
    room = starts.make_room(move, is_before=True)
    fitting = [uuid for where, uuid, card in room.cards
               if where == node and room.without(room.running).can_take(first, 100, where, uuid, card)]
    if len(fitting) < len(find_shares(first)) or (not first.only_node and len(starts.world.hosts) > 1):
        return                          # it needs others' cards too, or may get them elsewhere
    is_told = any(job.expected_time for job in live)
    later = [job for job in move.started if is_known(ledger, job) and comes_before(ledger, move, first, job)]
    used = {*room.used, *(uuid for job in move.started if job not in later for uuid in job.current.gpu_uuids)}
    for job in later:
        free = [uuid for uuid in job.current.gpu_uuids if uuid in fitting and uuid not in used]
        is_brief = job.expected_time is not None and is_told
        if free and not is_brief:
            starts.fail(f"job {job.id} gets {free}, which are to be kept for job {first.id}: that has waited for "
                        f"{find_wait_s(first, move.now):.0f} s")


def find_starving(starts: Starts, ledger: Ledger, move: Move, live: list[Job]) -> Job | None:
    """The first job that waits for GPUs, if it has waited for long and asks for whole ones."""
    waiting = [job for job in move.after.pending.values() if job.gpus and job.status == "pending"]
    is_plain = all(is_known(ledger, job) and job.cwd == WORK_FOLDER for job in waiting)
    if not waiting or not is_plain or len({job.user for job in waiting}) > 1:
        return None                     # between users the GPUs in use decide who is the first
    waiting.sort(key=lambda job: (job.preemptible, *ledger.wishes[job.id].key))
    open_jobs = [job for job in waiting if not list_holds(ledger, move.after, job, move.now)
                 and not list_excess(starts, ledger, move.after, job, [*live, job])]
    first = open_jobs[0] if open_jobs else None
    if first is None or find_wait_s(first, move.now) < starts.setup.reserve_after_s or first.gpus % 1:
        return None
    return first

"""Who makes room: preemptible jobs, after their first minute, for a job that is not preemptible."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from judges.conditions import list_holds
from judges.ledger import Job, Ledger, Move
from judges.limits import list_excess
from judges.room import OLD_S, could_ever, find_unfit, get_card

if TYPE_CHECKING:
    from judges.starts import Starts

FIRST_S = 60.0


def check_stops(starts: Starts, ledger: Ledger, move: Move) -> None:
    stops: dict[str, list[Job]] = {}        # {the job that needs the room: those that are stopped for it}
    for job in move.stopped:
        if job.current.stop_cause != "preempted":
            continue
        age_s = move.now - (job.current.started_at or move.now)
        if not job.preemptible:
            starts.fail(f"job {job.id} is preempted, and is not preemptible")
        if age_s < FIRST_S - 0.1:
            starts.fail(f"job {job.id} is preempted {age_s:.1f} s after its start")
        named = re.match(r"job (\w+)", job.current.stop_line or "")
        stops.setdefault(named[1] if named else "", []).append(job)
    for job_id, stopped in stops.items():
        job = move.after.jobs.get(job_id)
        if job is None:
            starts.fail(f"{[one.id for one in stopped]} are preempted for nobody: {stopped[0].current.stop_line!r}")
        else:
            check_use(starts, ledger, move, job, stopped, len(stops) == 1)


def check_use(starts: Starts, ledger: Ledger, move: Move, job: Job, stopped: list[Job], is_alone: bool) -> None:
    """Those that are stopped let a job start that nothing else holds, and none of them is stopped in vain."""
    ids = [one.id for one in stopped]
    holds = list_holds(ledger, move.after, job, move.now)
    if job.status != "pending" or job.preemptible or holds:
        starts.fail(f"{ids} are preempted for job {job.id}, which is {job.status}: {holds}")
    if words := list_excess(starts, ledger, move.after, job, [*move.after.live.values(), job]):
        starts.fail(f"{ids} are preempted for job {job.id}, which may not start: {words}")
    node, ending = stopped[0].current.node, [one for one in move.after.running.values() if one.current.stop_cause]
    for one in stopped:
        cards = [get_card(starts.world, uuid) for uuid in one.current.gpu_uuids]
        if one.current.node != node or all(find_unfit(job, card, node) for card in cards):
            starts.fail(f"job {one.id} is preempted for job {job.id}, which may not have its GPUs")
    room = starts.make_room(move)
    if not could_ever(room, job, node, ending):
        starts.fail(f"{ids} are preempted for job {job.id}, which does not fit without them either")
    is_read = starts.world.now - starts.world.jumped_at > OLD_S
    is_sole = is_read and is_alone and len(ending) == len(stopped) and not move.started and starts.setup.is_calm
    for one in stopped if is_sole else ():
        fewer = [other for other in stopped if other is not one]
        if room.without(fewer).find_fit(job, [node]):
            starts.fail(f"job {one.id} is preempted for job {job.id}, which fits without that")

"""How much may run at once, and which cards a job may have."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import nexus
from judges.ledger import Job, Ledger, Move
from judges.room import (
    BUSY,
    IDLE_MIB,
    LISTED_MIB,
    OLD_S,
    find_shares,
    find_unfit,
    get_card,
    sum_shares,
)

if TYPE_CHECKING:
    from judges.starts import Starts

CPU_SLOTS = 4


def check_limits(starts: Starts, ledger: Ledger, move: Move) -> None:
    """No start makes more run than a limit allows."""
    live = list(move.after.live.values())
    for job in move.started:
        for words in list_excess(starts, ledger, move.after, job, live):
            starts.fail(f"job {job.id} starts, and {words}")


def list_excess(starts: Starts, ledger: Ledger, state: nexus.State, job: Job, live: Iterable[Job]) -> list[str]:
    """The limits that are passed while these jobs run, `job` among them."""
    setup, words = starts.setup, []
    row, count = state.groups.get(job.group or ""), sum(other.group == job.group for other in live)
    most = row.limit if row else 0
    if ledger.is_calm and job.group in ledger.limits:
        most = ledger.limits[job.group]
    if most and count > most:
        words.append(f"{count} jobs of group {job.group} run then, and {most} are allowed")
    count = sum(other.user == job.user for other in live)
    if setup.max_running_per_user and count > setup.max_running_per_user:
        words.append(f"{count} jobs of {job.user} run then, and {setup.max_running_per_user} are allowed")
    count = sum(1 for _ in live)
    if setup.max_running and count > setup.max_running:
        words.append(f"{count} jobs run then, and {setup.max_running} are allowed")
    if not job.gpus and setup.launcher != "slurm":
        count = sum(not other.gpus and other.current.node == job.current.node for other in live)
        if count > CPU_SLOTS:
            words.append(f"{count} jobs without a GPU run then, and there are {CPU_SLOTS} slots")
    return words


def check_cards(starts: Starts, ledger: Ledger, move: Move) -> None:
    """A job gets as many cards as it asks for, of one machine, all of the kind that it asks for and in nobody's use."""
    if starts.setup.launcher == "slurm":        # which gives out the cards
        return
    used = sum_shares(move.after.running.values())
    for job in move.started:
        uuids, shares = job.current.gpu_uuids, find_shares(job)
        nodes = {uuid.partition("/")[0] if "/" in uuid else "" for uuid in uuids}
        if len({*uuids}) != len(shares) or len(uuids) != len(shares) or not nodes <= {job.current.node}:
            starts.fail(f"job {job.id} asks for {job.gpus} GPUs, and gets {uuids} on {job.current.node or 'a'}")
        for uuid, share in zip(uuids, shares):
            for words in list_faults(starts, ledger, move, job, uuid, share, used):
                starts.fail(f"job {job.id} gets {uuid}, and {words}")


def list_faults(starts: Starts, ledger: Ledger, move: Move, job: Job, uuid: str, share: int,
                used: dict[str, int]) -> Iterable[str]:
    """Why a job may not have a card."""
    world, card = starts.world, get_card(starts.world, uuid)
    if used[uuid] > 100:
        yield f"{used[uuid]} % of it are given out"
    if starts.setup.is_calm and (words := find_unfit(job, card, job.current.node)):
        yield words
    if uuid in move.after.paused_gpus or (ledger.is_calm and uuid in ledger.paused_places):
        yield "it is paused"
    passed_s = world.now - world.jumped_at
    if card.is_used and min(passed_s, world.now - starts.used_at.get(card.uuid, world.now)) > OLD_S and starts.setup.is_calm:
        yield "somebody else computes there"
    if share < 100 and card.mode:
        yield f"it is in mode {card.mode}, for one process only"
    others = [other for other in move.after.running.values() if other.id != job.id and uuid in other.current.gpu_uuids]
    runs = [run for run in world.runs if card.uuid in run.shares and run.process.is_alive
            and min(passed_s, world.now - run.began_at) > OLD_S]
    if others and runs and card.load >= BUSY and card.slice is None and starts.setup.is_calm:
        yield "its load is above load_threshold, and others run there"
    declared = sum(other.gpu_mem_mib or 0 for other in others)
    undeclared = sum(LISTED_MIB for run in runs if not run.job.gpu_mem_mib)
    need = declared + undeclared + (job.gpu_mem_mib or 0) + IDLE_MIB
    if job.gpu_mem_mib and need > card.memory_mib:
        yield f"{job.gpu_mem_mib} MiB are to be free; {declared + undeclared} of {card.memory_mib} are others'"

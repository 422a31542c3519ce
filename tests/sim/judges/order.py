"""Who goes first: priorities, places, turns of users."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from homes import Home
from world import WORK_FOLDER

from judges.conditions import list_holds
from judges.ledger import Job, Ledger, Move
from judges.limits import list_excess
from judges.room import find_shares, find_unfit, get_card

if TYPE_CHECKING:
    from judges.starts import Starts

ANY_CPU = 0.5       # jobs without a GPU count little, the documents do not say how much


def check_order(starts: Starts, ledger: Ledger, move: Move) -> None:
    """Nobody waits for what a job gets that comes after it."""
    if not starts.setup.is_calm:        # what was asked for last is not known well
        return
    waiting = [job for job in move.after.pending.values() if job.status == "pending" and is_known(ledger, job)]
    gone = [job for job_id, job in move.before.live.items() if job_id not in move.after.live]
    is_ending = any(one.current.stop_cause for one in move.after.live.values())
    for job in waiting:
        is_freed = any(one.group == job.group for one in gone if job.group) or bool(gone and starts.setup.max_running)
        if is_freed:
            continue                        # a limit may have held it when this was decided
        if is_ending and job.group and any(one.group == job.group and one.id != job.id and comes_before(ledger, move, one, job)
                                           for one in waiting):
            continue                        # a limit may hold it as one before it is about to start when that has ended
        if starts.setup.max_running_per_user and any(one.user == job.user and one.id != job.id and comes_before(ledger, move, one, job)
                                                     for one in [*waiting, *gone] if is_known(ledger, one)):
            continue                        # one before it may be about to start, when what is being ended has ended
        is_open = None
        for other in move.started:
            if not is_known(ledger, other) or not comes_before(ledger, move, job, other):
                continue
            if is_open is None:
                is_open = not list_holds(ledger, move.after, job, move.now - 0.1) and not job.excluded_nodes
            if is_open and could_replace(starts, ledger, move, job, other):
                starts.fail(f"job {other.id} of {other.user} starts, and {job.id} of {job.user}, which comes before it "
                            f"and asks for no more, waits: {ledger.wishes[other.id].key}, {ledger.wishes[job.id].key}")


def is_known(ledger: Ledger, job: Job) -> bool:
    return job.id in ledger.wishes and ledger.wishes[job.id].is_sure


def comes_before(ledger: Ledger, move: Move, job: Job, other: Job) -> bool:
    """Whether a job certainly comes before one that starts."""
    key, others = ledger.wishes[job.id].key, ledger.wishes[other.id].key
    band, others_band = (job.preemptible, *key[:2]), (other.preemptible, *others[:2])
    if band != others_band:
        return band < others_band
    if job.user == other.user:
        return key < others
    # The user with the fewest GPUs in use goes first; if two have the same number, whose last start is longer ago.
    started = {one.id for one in move.started}
    # What is being ended counts for whom it makes room, which is not seen here.
    least = sum(one.gpus for one in move.after.live.values()
                if one.user == other.user and one.id not in started and not one.current.stop_cause)
    most = sum(one.gpus or 0.01 for one in move.after.live.values()
               if one.user == job.user or one.current.stop_cause)
    return most + ANY_CPU < least


def could_replace(starts: Starts, ledger: Ledger, move: Move, job: Job, other: Job) -> bool:
    """Whether a job could have started in the place of another."""
    live = [one for one in move.after.live.values() if one.id != other.id]
    if list_excess(starts, ledger, move.after, job, [*live, job]):
        return False
    if starts.setup.launcher == "slurm":
        return True
    if job.only_node not in (None, other.current.node) or job.cwd != WORK_FOLDER:       # a job waits for its directory
        return False
    if not job.gpus or not other.gpus:
        return not job.gpus and not other.gpus
    shares, others = find_shares(job), find_shares(other)
    is_brief = other.expected_time is not None and other.expected_time < (job.expected_time or float("inf"))
    if len(shares) != len(others) or is_brief or (job.gpu_mem_mib or 0) > (other.gpu_mem_mib or 0):
        return False
    for uuid, share, given in zip(other.current.gpu_uuids, shares, others):
        card = get_card(starts.world, uuid)
        if share > given or (share < given and (card.mode or share < 100)) or find_unfit(job, card, other.current.node):
            return False
    return True


def check_list(starts: Starts, home: Home) -> None:
    """GET /queue lists each user's jobs in the order in which they are to start."""
    ledger = starts.ledgers[home.path]
    status, rows = home.call("GET", "/queue?fields=id,user,status,preemptible")
    if status != 200:
        return
    last: dict[str, Any] = {}
    for row in rows:
        wish, job = ledger.wishes.get(row["id"]), home.service.store.state.jobs.get(row["id"])
        if wish is None or not wish.is_sure or job is None or job.status != "pending":      # Slurm has its own order
            continue
        key = row["preemptible"], *wish.key
        if last.get(row["user"], (key, ""))[0] > key:
            starts.fail(f"{row['id']} is listed behind {last[row['user']][1]}: {key}, {last[row['user']][0]}")
        last[row["user"]] = key, row["id"]

"""What a card can take, by the documents: of its kind, free, and not kept from jobs."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from world import Card, Host, World

from judges.ledger import Job

LISTED_MIB, IDLE_MIB = 1000.0, 10.0         # what a process has on a card, and a card that nobody uses: Host.list_gpus()
BUSY = 80.0                                 # load_threshold, in percent
OLD_S = 16.0                                # readings that are older give out no GPU


def list_shares(gpus: float) -> list[int]:
    """In hundredths of a card: 1.5 is one card, and half of another."""
    whole, part = divmod(round(gpus * 100), 100)
    return [100] * int(whole) + ([int(part)] if part else [])


def find_shares(job: Job) -> list[int]:
    """Those of a job; after it ran out of GPU memory its share is a whole card."""
    has_failed = any(attempt.cause == "cuda-oom" for attempt in job.attempts)
    return [100 if has_failed else share for share in list_shares(job.gpus)]


def get_host(world: World, uuid: str) -> Host:
    return world.hosts[uuid.partition("/")[0] if "/" in uuid else "a"]


def get_card(world: World, uuid: str) -> Card:
    """A service names the cards of a node n1/UUID."""
    name = uuid.rpartition("/")[2]
    return next(card for card in get_host(world, uuid).cards if card.uuid == name)


def list_cards(world: World) -> list[tuple[str, str, Card]]:
    """(machine, "" for the service's own; its uuid for the service; the card)"""
    return [("" if name == "a" else name, card.uuid if name == "a" else f"{name}/{card.uuid}", card)
            for name, host in world.hosts.items() for card in host.cards]


def find_unfit(job: Job, card: Card, node: str) -> str:
    """Why a job may never have a card; "" if it may."""
    shown = card.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    wanted = (job.gpu_type or "").lower()
    if wanted == "full" and card.slice is not None:
        return "it is a slice"
    if wanted != "full" and wanted not in shown.lower():
        return f"it is a {shown}"
    if job.gpu_ids is not None and not {card.index, str(card.index), card.place} & {*job.gpu_ids}:
        return f"its number is {card.place}"
    if job.gpus > 1 and card.slice is not None:
        return "it is a slice, and the job wants several GPUs"
    if job.only_node is not None and job.only_node != node:
        return f"it is of machine {node or 'a'}"
    if (job.gpu_mem_mib or 0) > card.memory_mib:
        return f"it has {card.memory_mib} MiB"
    return ""


def sum_shares(jobs: Iterable[Job]) -> dict[str, int]:
    """{uuid: hundredths that these jobs have}"""
    used: dict[str, int] = {}
    for job in jobs:
        for uuid, share in zip(job.current.gpu_uuids, find_shares(job)):
            used[uuid] = used.get(uuid, 0) + share
    return used


class Room:
    """What the cards of all machines have left beside some jobs."""

    def __init__(self, world: World, running: Sequence[Job], paused: Iterable[str], used_at: Mapping[str, float]) -> None:
        """`used_at`: {uuid: when others began or ended to use it last}"""
        self.world, self.running, self.paused, self.used_at = world, running, {*paused}, used_at
        self.used = sum_shares(running)
        self.cards = list_cards(world)
        self.declared: dict[str, float] = {}
        for job in running:
            for uuid in job.current.gpu_uuids:
                self.declared[uuid] = self.declared.get(uuid, 0.0) + (job.gpu_mem_mib or 0)

    def without(self, gone: Iterable[Job]) -> Room:
        """As if these jobs had ended."""
        ids = {job.id for job in gone}
        return Room(self.world, [job for job in self.running if job.id not in ids], self.paused, self.used_at)

    def can_take(self, job: Job, share: int, node: str, uuid: str, card: Card) -> bool:
        """Whether a job can certainly have a share of a card now: what is not known well counts as in its way."""
        taken = self.used.get(uuid, 0)
        if taken + share > 100 or uuid in self.paused or card.is_gone or find_unfit(job, card, node):
            return False
        if card.is_used or self.world.now - self.used_at.get(card.uuid, 0.0) < OLD_S:
            return False
        if share < 100 and card.mode:
            return False
        if taken and (card.load >= BUSY or job.gpu_mem_mib):
            return False
        if not job.gpu_mem_mib:
            return True
        if any(card.uuid in run.shares and self.world.now - (run.ended_at or 0.0) < OLD_S for run in self.world.runs[-20:]):
            return False                # its memory is not known before the next reading
        left = sum(LISTED_MIB for run in self.world.runs if card.uuid in run.shares for _ in run.left)
        return left + self.declared.get(uuid, 0.0) + job.gpu_mem_mib + IDLE_MIB <= card.memory_mib

    def find_fit(self, job: Job, nodes: Iterable[str], only: Iterable[str] | None = None) -> list[str]:
        """Cards of one of these machines that a job can certainly have now; [] where it does not fit.

        `only`: the cards, by uuid, that it is to get.
        """
        shares, among = sorted(find_shares(job)), None if only is None else {*only}
        for node in nodes:
            chosen: list[str] = []
            for share in shares:                # the share of a card first: it fits where a whole card does
                fitting = [uuid for where, uuid, card in self.cards if where == node and uuid not in chosen
                           and (among is None or uuid in among) and self.can_take(job, share, node, uuid, card)]
                if not fitting:
                    break
                chosen.append(max(fitting, key=lambda uuid: self.used.get(uuid, 0)))
            else:
                return chosen
        return []


def could_ever(room: Room, job: Job, node: str, gone: Iterable[Job]) -> bool:
    """Whether a job may fit on a machine when others have ended, for all that can be seen from outside."""
    left = room.without(gone)
    shares = sorted(find_shares(job), reverse=True)
    free = sorted((100 - left.used.get(uuid, 0) for where, uuid, card in room.cards
                   if where == node and not find_unfit(job, card, node)), reverse=True)
    return len(free) >= len(shares) and all(space >= share for space, share in zip(free, shares))


"""What starts when: each start that a service records must be one that the documents allow, and none that they promise
may be missing.

The facts are what people asked for, what is recorded of jobs, and the cards and processes of the made-up machines.
"""
from __future__ import annotations

from typing import Any

from homes import Home

from judges import limits, order, preempting, waiting
from judges.conditions import check_followers, check_start
from judges.judge import Judge
from judges.ledger import FINAL, Ledger, Move
from judges.room import Room


class Starts(Judge):
    def __init__(self, actions: Any) -> None:
        super().__init__(actions)
        self.ledgers = {home.path: Ledger(home, self.setup.is_calm) for home in self.homes}
        self.used_at: dict[str, float] = {}             # {uuid of a card: when others began or ended to use it last}
        self.was_used: dict[str, bool] = {}
        self.cards = [card for host in self.world.hosts.values() for card in host.cards]
        self.doubts: dict[tuple[str, int], float] = {}  # {(job that waits though there is room, the state's seq): since when}
        self.looked_at: dict[str, object] = {}          # {path of a home: the state, and when, of waiting.check()}

    def on_request(self, home: Home, method: str, path: str, body: Any, user: str, status: int, reply: Any) -> None:
        self.follow()
        if self.setup.is_calm and 200 <= status < 300 and method in ("POST", "PATCH"):
            for words in self.ledgers[home.path].note(method, path, body, user, reply):
                self.fail(words)

    def after_step(self) -> None:
        for card in self.cards:
            if card.foreign and card.is_used != self.was_used.get(card.uuid, False):
                self.was_used[card.uuid], self.used_at[card.uuid] = card.is_used, self.world.now
        self.follow()
        if self.setup.is_calm:
            waiting.check_waiting(self)
        for home in self.homes:
            self.ledgers[home.path].stepped_at = home.host.wall()

    def look(self) -> None:
        for home in self.list_homes():
            self.check_groups(home)
            if self.setup.is_calm:
                order.check_list(self, home)

    def follow(self) -> None:
        """Judge what was recorded since the last time."""
        for home in self.homes:
            ledger = self.ledgers[home.path]
            for move in ledger.list_moves():
                if home.is_damaged:                     # what is recorded may be older than what was promised
                    continue
                for job in move.started:
                    check_start(self, ledger, move, job)
                if move.started:
                    limits.check_limits(self, ledger, move)
                    limits.check_cards(self, ledger, move)
                    order.check_order(self, ledger, move)
                    waiting.check_reserved(self, ledger, move)
                if move.ended:
                    check_followers(self, ledger, move)
                if move.stopped:
                    preempting.check_stops(self, ledger, move)

    def make_room(self, move: Move, is_before: bool = False) -> Room:
        """What is left of the cards after a change, or before the starts in it."""
        ids = {job.id for job in move.started} if is_before else ()
        running = [job for job in move.after.running.values() if job.id not in ids]
        return Room(self.world, running, move.after.paused_gpus, self.used_at)

    def check_groups(self, home: Home) -> None:
        """Who comes after a group waits as long as a job of it has not ended."""
        if home.is_damaged:
            return
        jobs = home.service.store.state.jobs.values()
        unfinished = {group for job in jobs if job.status not in FINAL for group in (job.group, *job.retried_groups)}
        for job in jobs:
            awaited = unfinished.intersection((*job.after_group, *job.after_any_group))
            if job.status == "pending" and not job.attempts and {*job.pending_groups} != awaited:
                self.fail(f"job {job.id} waits for the groups {job.pending_groups}, and not {sorted(map(str, awaited))}")



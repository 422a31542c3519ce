"""A Slurm as values: it may show its queue late, forget jobs, queue them again, or lose what it did in the last minute."""
from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from runner import Settings, run_job
from world import SIGKILL, Host, SimProcess, World, current

import nexus

SLOTS = 2                   # jobs that run at once
KEPT_S = 300.0              # how long an ended job is shown
KILL_S = 30.0               # from scancel's SIGTERM to its SIGKILL


class Row:
    """A job of Slurm's."""

    def __init__(self, slurm_id: str, key: str, job: nexus.Job, script: str) -> None:
        self.id, self.key, self.job, self.script = slurm_id, key, job, script
        self.state, self.reason = "PENDING", "Priority"
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.kill_at: float | None = None           # of the simulation's clock
        self.is_cancelled = False

    def show(self) -> nexus.SlurmJob:
        return nexus.SlurmJob(self.id, self.state, self.reason, "a" if self.started_at else "", self.started_at,
                              self.ended_at, self.key)


class Cluster:
    """Slurm's controller, with one node: the machine itself."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host, self.last_id = world, host, 0
        self.rows: dict[str, Row] = {}
        self.runners: dict[str, SimProcess] = {}    # {id: the job.sh that it has started}
        self.is_down = False
        self.is_late = False
        self.saved: deque[tuple[float, dict[str, Row]]] = deque(maxlen=200)

    def submit(self, key: str, job: nexus.Job, script: str) -> str:
        self.last_id += 1
        self.rows[str(self.last_id)] = Row(str(self.last_id), key, job, script)
        return str(self.last_id)

    def list_rows(self) -> list[nexus.SlurmJob]:
        rows = self.rows
        if self.is_late:
            rows = next((rows for at, rows in reversed(self.saved) if at < self.world.now - 2.0), rows)
        return [row.show() for row in rows.values()]

    def cancel(self, slurm_id: str) -> None:
        row = self.rows.get(slurm_id)
        if row is None or row.ended_at:
            return
        row.is_cancelled = True
        if row.state == "PENDING":
            self.end(row, "CANCELLED")
        elif row.kill_at is None:
            row.kill_at = self.world.now + KILL_S
            for process in self.list_processes(row):
                process.hear(15)

    def list_processes(self, row: Row) -> list[SimProcess]:
        mark = f"{row.job.id} {row.job.current.nonce}"
        return [process for process in self.host.processes.values() if process.mark == mark]

    def kill(self, row: Row) -> None:
        """Slurm ends all that it has started for a job."""
        runner = self.runners.pop(row.id, None)
        for run in self.world.runs:
            run.was_cut |= run.runner is runner
        for process in [*([runner] if runner else []), *self.list_processes(row)]:
            process.end(128 + SIGKILL)

    def end(self, row: Row, state: str) -> None:
        self.kill(row)
        row.state, row.ended_at = state, self.host.wall()

    def launch(self, row: Row) -> None:
        row.state, row.reason, row.started_at = "RUNNING", "None", self.host.wall()
        process = self.runners[row.id] = SimProcess(self.host, "bash", role=f"runner {row.script} {row.job.attempt}")
        try:
            with process.being_run():
                settings = Settings.read(process.disk, row.script)
        except OSError:                             # its folder is gone
            process.end(1)
            return
        mark = f"{row.job.id} {row.job.current.nonce}"
        self.world.runners.append((process, run_job(process, settings, row.job, mark, "slurm", is_slurm=True)))

    def queue_again(self, row: Row) -> None:
        self.kill(row)
        row.state, row.reason, row.started_at = "PENDING", "BeginTime", None

    def advance(self) -> None:
        """What the controller does by itself."""
        if self.is_down:
            return
        for row in list(self.rows.values()):
            runner = self.runners.get(row.id)
            if row.state == "RUNNING" and not (runner and runner.is_alive):
                code = runner.exit_code if runner else 1
                self.end(row, "CANCELLED" if row.is_cancelled else "FAILED" if code else "COMPLETED")
            elif row.state == "RUNNING" and row.kill_at is not None and self.world.now >= row.kill_at:
                self.end(row, "CANCELLED")
            elif row.ended_at and self.host.wall() - row.ended_at > KEPT_S:
                del self.rows[row.id]
        running = sum(row.state == "RUNNING" for row in self.rows.values())
        for row in self.rows.values():
            if row.state == "PENDING" and running < SLOTS:
                self.launch(row)
                running += 1
        if not self.saved or self.world.now - self.saved[-1][0] >= 1.0:
            self.saved.append((self.world.now, {key: copy.copy(row) for key, row in self.rows.items()}))

    def lose_a_minute(self) -> None:
        """The controller comes back with what it had saved a minute ago."""
        before = next((rows for at, rows in reversed(self.saved) if at < self.world.now - 60.0), {})
        for row in list(self.rows.values()):
            former = before.get(row.id)
            if former is None or former.state != row.state:
                self.kill(row)
        self.rows = {key: copy.copy(row) for key, row in before.items()}

    def trouble(self, rnd: random.Random) -> None:
        way, rows = rnd.randrange(6), [row for row in self.rows.values() if row.ended_at is None]
        if way == 0:
            self.is_down = not self.is_down
        elif way == 1:
            self.is_late = not self.is_late
        elif way == 2:
            self.lose_a_minute()
        elif rows:
            row = rnd.choice(rows)
            if way == 3:
                self.queue_again(row)
            elif way == 4:
                self.end(row, "NODE_FAIL")
            else:                                   # an operator, or another tool, cancels it
                self.cancel(row.id)


class SimSlurm(nexus.Slurm):
    """Slurm's programs, as the service runs them."""

    @property
    def cluster(self) -> Cluster:
        return current().cluster                    # type: ignore[no-any-return]

    def ask(self, *argv: str) -> Any:
        raise NotImplementedError                   # only the others ask

    def read(self, *argv: str) -> str:
        raise NotImplementedError

    def check(self) -> None:
        """Raises: unavailable."""
        if self.cluster.is_down:
            raise nexus.fail_slurm("Unable to contact slurm controller (connect failure)")

    def run_sbatch(self, argv: Sequence[str]) -> tuple[str | None, str]:
        self.check()
        process = current().running
        process.count_effect()
        words: Mapping[str, str] = dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word)
        job_id, key = words["job-name"].partition("_")[2], words["comment"].rpartition(":")[2]
        job = process.service.store.state.jobs[job_id]          # type: ignore[attr-defined]
        slurm_id = self.cluster.submit(key, job, argv[-1].split()[2])
        process.count_effect()                      # it may be killed before it hears the answer
        return slurm_id, ""

    def query_jobs(self) -> list[nexus.SlurmJob]:
        self.check()
        return self.cluster.list_rows()

    def cancel(self, ids: Sequence[str]) -> str:
        self.check()
        current().running.count_effect()
        for slurm_id in ids:
            self.cluster.cancel(slurm_id)
        return ""

    def query_partitions(self) -> tuple[nexus.SlurmPartition, ...]:
        self.check()
        return ()

    def query_name(self) -> str:
        self.check()
        return "sim"

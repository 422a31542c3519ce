"""What the service does with readings of GPUs: idle jobs, bad GPUs, loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..hosting.events import WATCH_INTERVAL_S
from ..hosting.loop import Component
from ..hosting.observer import Observer
from ..machine.processes import measure_machine
from ..opening import TYPE_CHECKING
from ..schedule.capacity import find_gpu_reason, is_left_out
from ..schedule.ends import Ended, find_bad_gpu
from ..schedule.limits import find_limits, find_stop
from ..values.gpu import Gpu, find_places, is_gpu_meant
from ..values.job import Job, Use
from ..values.state import Put, State
from ..values.text import format_count, format_duration, format_indices, format_line
from ..values.value import replace

if TYPE_CHECKING:
    from typing import Any

    from ..values.state import Changes
    from .service import Service

FIRST_LOOK_S = 5.0              # after a start, a request that names a GPU waits so long for the first refresh
LOADS_S = 3600.0                # how long GPUs' utilization is kept

IDLE_LOAD = 5.0                 # a GPU whose utilization is below so many percent is idle
UNSEEN_S = 60.0                 # after such a pause between readings, as of a machine that slept, it idles anew


class GpuWatch(Component):
    """All GPUs as the scheduler sees them, and why they get no jobs now."""

    def __init__(self, service: Service) -> None:
        import collections
        import threading
        super().__init__(service)
        self.observer: Observer = service.observer
        self.first_probe = threading.Event()
        self.gpus: tuple[Gpu, ...] = ()                     # of this machine
        self.ended: collections.deque[Ended] = collections.deque(maxlen=500)    # attempts, the latest last
        self.machine_use = measure_machine(None)
        self.loads: Mapping[str, Sequence[tuple[float, float]]] = {}    # {GPU uuid: (monotonic, percent), last hour}
        # {uuid of an idle GPU: since when, UTC; since when and when last seen so, monotonic}
        self.idle: Mapping[str, tuple[float, float, float]] = {}
        self.looked_at = float("-inf")                      # monotonic: when jobs were looked at for that

    def set_gpu_paused(self, place: str, is_paused: bool, who: str) -> None:
        """Pause or resume a GPU, or all slices of a card, also of a node.  Raises: not_found."""
        self.first_probe.wait(FIRST_LOOK_S)
        node, gpus_at = place.rpartition(":")[0], {gpu.place: gpu for gpu in self.all_gpus()}
        if node not in ("", self.service.node):
            self.service.pool.find_node(node)
        gpus = [gpus_at[found] for found in find_places(place, gpus_at, self.service.node)]
        uuids = [gpu.uuid for gpu in gpus]

        def pause(state: State) -> Changes:
            others = tuple(other for other in state.paused_gpus if other not in uuids)
            yield from pause_gpus(state, (*others, *uuids) if is_paused else others)

        self.service.change(pause, "GPU %s %s by %s", format_indices(gpu.place for gpu in gpus),
                            "paused" if is_paused else "resumed", who)
        if not is_paused:
            for uuid in uuids:
                self.ended.append(Ended((uuid,), "", False, False, self.clock.now()))     # resets the guard's count
        self.store.checkpoint_wanted.set()

    def name_paused(self, state: State) -> Changes:
        """Have uuids in the place of places that were written while the GPUs were unknown."""
        uuids = self.find_uuids(state, state.paused_gpus)
        if (*uuids,) != state.paused_gpus:
            yield from pause_gpus(state, uuids)

    def find_uuids(self, state: State, listed: Sequence[Any]) -> list[str]:
        """The uuids of GPUs that another program may have named by places; while no GPU is known, what was named."""
        gpus = self.all_gpus()
        uuids = {*(gpu.uuid for gpu in gpus), *state.paused_gpus}       # a card that was paused may come back
        named: list[str] = []
        for item in map(str, listed):
            named += [gpu.uuid for gpu in gpus if is_gpu_meant(item, gpu.place)] or [item]
        return [uuid for uuid in dict.fromkeys(named) if uuid in uuids or not gpus]

    def take_in_observation(self) -> None:
        """Take the latest reading of the GPUs, and show it to the scheduler."""
        before = self.observer.observation
        if not self.observer.take_in(self.service.local.list_own()):
            return
        latest = self.observer.observation
        self.show_gpus()
        self.note_loads()
        if (latest.error != before.error or len(latest.gpus) != len(before.gpus)) and not self.service.is_slurm:
            if latest.error:
                self.log.error("GPUs: %s", latest.error)
            else:
                self.log.info("Found %s%s", format_count(len(latest.gpus), "GPU"), self.describe_limit("; nexus "))
        for gpu in latest.gpus:
            if gpu.fault and gpu.fault not in [old.fault for old in before.gpus if old.uuid == gpu.uuid]:
                self.log.error("GPU %s: %s", gpu.place, gpu.fault)
        self.first_probe.set()
        if [gpu.uuid for gpu in latest.gpus] != [gpu.uuid for gpu in before.gpus]:
            self.store.update(self.name_paused)
        self.machine_use = measure_machine(self.machine.psutil)

    def show_gpus(self) -> None:
        """Take over the GPUs with their users, and add their mean and peak load."""
        self.gpus = tuple(map(self.add_load, self.observer.gpus))

    def add_load(self, gpu: Gpu) -> Gpu:
        loads = [percent for _, percent in self.loads.get(gpu.uuid, ())]
        return replace(gpu, utilization_mean=sum(loads) / len(loads) if loads else None,
                       utilization_peak=max(loads, default=None))

    def note_loads(self) -> None:
        """Add each GPU's utilization; drop what is over an hour old, and GPUs that are gone."""
        now = self.clock.monotonic()
        unread = {name for name, node in self.service.pool.nodes.items() if node.error}
        if self.observer.find_gpu_error():
            unread.add("")
        loads, idle = {}, {}
        longest_s = max(UNSEEN_S, 3 * self.config.service.refresh_rate_seconds)
        for gpu in self.all_gpus():
            loads[gpu.uuid] = [load for load in self.loads.get(gpu.uuid, ()) if now - load[0] < LOADS_S]
            if gpu.utilization is not None:
                loads[gpu.uuid].append((now, gpu.utilization))
                if gpu.utilization < IDLE_LOAD and gpu.node not in unread:
                    since_utc, since, last = self.idle.get(gpu.uuid, (0.0, 0.0, float("-inf")))
                    was_seen = now - last <= longest_s
                    idle[gpu.uuid] = (since_utc if was_seen else self.clock.now()), (since if was_seen else now), now
        self.loads, self.idle = loads, idle
        self.service.gpu_history.take_readings(self.all_gpus(), unread)

    def find_idle(self, job: Job) -> tuple[float, float]:
        """(since when, UTC; for how many seconds) all GPUs of a running job are known to be idle."""
        spans = [self.idle[uuid] for uuid in job.current.gpu_uuids if uuid in self.idle]
        if not spans or len(spans) < len(job.current.gpu_uuids):
            return 0.0, 0.0
        began = self.clock.monotonic() - self.service.outcomes.find_runtime_s(job, self.clock.now())
        since = max(began, *(since for _, since, _ in spans))
        since_utc = max(job.current.started_at or 0.0, *(at for at, _, _ in spans))
        last = min(last for _, _, last in spans)
        return since_utc, max(0.0, last - since)

    def find_idle_since(self, job: Job) -> float | None:
        """Since when a job has been idle; None: it is not, or not for idle_minutes."""
        (since, idle_s), limit_s = self.find_idle(job), self.config.jobs.idle_minutes * 60
        return since if limit_s and idle_s >= limit_s else None

    def look_for_idle_jobs(self) -> None:
        """Tell of jobs that have been idle for idle_minutes, and stop those that were for idle_kill_minutes."""
        if self.clock.monotonic() - self.looked_at < WATCH_INTERVAL_S:
            return
        self.looked_at = self.clock.monotonic()
        for job in self.service.running_jobs():
            _, idle_s = self.find_idle(job)
            if self.find_idle_since(job) is not None and not job.current.is_idle_told:
                self.service.record(job, is_idle_told=True)
                self.service.tell(job, "Job %s is idle: its GPUs did nothing for %s.  Does it wait for an answer? "
                                  "nexus attach %s", job.id, format_duration(idle_s), job.id)
                self.service.hooks.queue("on_idle", [job])
            stop = find_stop(find_limits(job, self.config.jobs), Use(idle_s=idle_s))
            if stop and not job.current.stop_cause:
                self.service.record(job, stop_cause=stop[0], stop_line=stop[1])

    def describe_limit(self, before: str = "") -> str:
        """Return `before` and which GPUs the service uses, or "" if it may use all."""
        gpus = self.observer.observation.gpus
        if not any(gpu.is_withheld for gpu in gpus):
            return ""
        used, visible = sum(not is_left_out(gpu, self.config.gpu) for gpu in gpus), self.service.visible_devices or ""
        return f"{before}uses {used} of {len(gpus)} GPUs (CUDA_VISIBLE_DEVICES={format_line(visible, 60)})"

    def find_gpu_error(self) -> str | None:
        """Return why jobs get no GPU now, or None."""
        if self.service.cluster and self.service.is_slurm:
            return self.service.cluster.find_reason()
        return self.observer.find_error()

    def all_gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs of this machine, then of the nodes."""
        others = [gpu for node in self.service.pool.nodes.values() for gpu in node.reports.gpus]
        return (*self.gpus, *map(self.add_load, others))

    def see_gpus(self, state: State) -> list[Gpu]:
        """Return all_gpus() with `is_paused` as in `state`."""
        reasons, paused = dict(state.pause_reasons), state.paused_gpus
        return [replace(gpu, is_paused=True, pause_reason=reasons.get(gpu.uuid)) if gpu.uuid in paused else gpu
                for gpu in self.all_gpus()]

    def guard_gpu(self, uuid: str) -> None:
        """Pause a GPU where jobs fail that run well elsewhere; never the last usable GPU."""
        reason = find_bad_gpu(tuple(self.ended), uuid, self.config.gpu)

        def pause(state: State) -> Changes:
            others = [find_gpu_reason(gpu, self.config.gpu) for gpu in self.see_gpus(state) if gpu.uuid != uuid]
            is_last = not any(found is None or found.code == "resources" for found in others)
            if is_last or uuid in state.paused_gpus:
                return False
            yield from pause_gpus(state, (*state.paused_gpus, uuid), (uuid, reason or ""))
            return True

        if reason and self.store.update(pause):
            place = next((gpu.place for gpu in self.all_gpus() if gpu.uuid == uuid), uuid)
            self.log.error("GPU %s is paused: %s; nexus resume %s clears it", place, reason, place)
            self.service.wake()


def pause_gpus(state: State, uuids: Sequence[str], *reasons: tuple[str, str]) -> Changes:
    """Yield the changes that make these the paused GPUs.  `reasons`: (uuid, why nexus itself pauses it)."""
    yield Put("facts", "paused_gpus", tuple(uuids))
    kept = [pair for pair in state.pause_reasons if pair[0] in uuids]
    yield Put("facts", "pause_reasons", (*kept, *reasons))

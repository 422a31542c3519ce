"""Why a pending job waits, for whoever looks at it."""

from __future__ import annotations

from ..hosting.loop import Component
from ..opening import TYPE_CHECKING
from ..schedule.capacity import find_age, list_verdicts
from ..schedule.ends import LACK_OF_MEMORY
from ..schedule.explain import describe_place
from ..schedule.plan import list_reasons
from ..schedule.preemption import PREEMPT_AFTER_S
from ..schedule.reasons import Plan, Reason, find_pause, format_reasons
from ..values.causes import SIGNAL
from ..values.job import PENDING, RUNNING, SUBMITTED, Job
from ..values.queue_order import PendingQueue
from ..values.state import State
from ..values.text import format_duration
from ..values.value import replace
from ..views.api_json import get_outcome, reason_json
from ..views.show import format_place, format_verdicts
from ..views.status_text import Paint
from .access import Identity, find_own_job

if TYPE_CHECKING:
    from typing import Any


class Explainer(Component):
    """Tells why pending jobs wait, by the latest plan."""

    def explain(self, job_id: str, caller: Identity) -> dict[str, Any]:
        """GET /jobs/{id}/why: why a job waits, with a verdict for each GPU.  Raises: not_found, forbidden."""
        now, estimates, state = self.clock.now(), self.service.estimates.find_starts(), self.store.state
        capacities = () if self.service.is_slurm else self.service.plan.gpus
        job = find_own_job(state, job_id, caller)
        answer: dict[str, Any] = {
            "id": job.id, "status": job.shown_status, "reason": None, "facts": [], "gpus": [], "verdicts": []}
        if job.shown_status != PENDING:
            last = job.current
            place = f" as Slurm's {last.slurm_id}" if last.slurm_id else ""
            place += format_place(last.gpu_places, last.slurm_node or last.node)
            ran = "; ".join([f"it runs{place}", *last.notes]) if job.status == RUNNING else f"it ran{place}"
            end = last.cause_line or last.cause or ran
            outcome = f"{get_outcome(last)}: " if last.cause == SIGNAL and last.cause_line != LACK_OF_MEMORY else ""
            return {**answer, "why": outcome + end}
        position = PendingQueue(state).find_position(job)
        facts = describe_place(job, position, estimates.get(job.id), capacities, self.config.jobs, now,
                               self.service.plan.box is not None)
        for other in state.running.values() if job.gpus and not job.preemptible else ():
            left_s = PREEMPT_AFTER_S - find_age(other, now)
            if other.preemptible and left_s > 0:
                facts.append(f"job {other.id} is preemptible: it may have to end in {format_duration(left_s)} or later")
        verdicts = list_verdicts(job, capacities, self.config.gpu, now) if job.gpus else []
        gpus = [{"node": capacity.gpu.node or self.service.node, "place": capacity.gpu.place,
                 "index": capacity.gpu.index,
                 "verdict": reason and reason.detail} for capacity, reason in verdicts]
        reasons = self.list_reasons(job, state, self.find_plan(state))
        return {**answer, "why": format_reasons(reasons), "reason": reason_json(reasons[0]), "facts": facts,
                "gpus": gpus, "verdicts": format_verdicts(gpus, Paint(""))}

    def list_reasons(self, job: Job, state: State, planned: Plan) -> list[Reason]:
        """Return why a pending job does not run now, the first that holds it first."""
        error = self.store.last_error
        if error:
            return [Reason("node-down", "", error.message)]
        if self.service.cluster and job.status == SUBMITTED:
            return [Reason("resources", "slurm", self.service.cluster.find_wait(job))]
        return list_reasons(job, state.groups.get(job.group or ""), planned, self.config, self.clock.now(),
                            self.service.user, state.awaited)

    def find_plan(self, state: State) -> Plan:
        """Return the latest plan."""
        planned, pause = self.service.plan, find_pause(state)
        if pause or (planned.reason and planned.reason.code == "paused"):   # it may be out of date
            planned = replace(planned, reason=pause)
        return planned

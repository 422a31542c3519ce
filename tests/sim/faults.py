"""Faults that are put in by hand, to see that the histories find them: tests/sim/run --fault NAME"""
from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[2]
NEXUS = TOP / "nexus.py"


@dataclass(frozen=True)
class Fault:
    """What it changes in a room of src: a piece, which is there once, and what stands in its place."""
    room: str
    piece: str
    wrong: str

    def count_places(self) -> int:
        return (TOP / "src" / f"{self.room}.py").read_text().count(self.piece)


FAULTS = {
    # Machines and disks
    "the claim is not checked": Fault(
        "runner/claims",
        "    claim = take_claim(disk, folder, key)\n    if not claim.is_open:",
        "    claim = OUR_CLAIM\n    if not claim.is_open:"),
    "state.json.prev is a link": Fault(
        "store/store",
        "                    make_previous(self.disk, aside, path)\n            self.checkpoint_seq",
        '                    remove_file(self.disk, f"{path}.prev")\n'
        '                    self.disk.link(path, f"{path}.prev")\n            self.checkpoint_seq'),
    "a sync is left out": Fault(
        "store/store",
        "            append_whole(self.disk, self.handle, record, is_synced)",
        "            append_whole(self.disk, self.handle, record)"),
    "a report is taken for another's": Fault(
        "hosting/node_news",
        "        found = [(jobs[job_report.key], job_report) for job_report in report.jobs if job_report.key in jobs]",
        "        found = [*zip(sorted(jobs.values(), key=lambda job: -job.number), report.jobs)]"),
    # What starts when
    "a share is given twice": Fault(
        "schedule/capacity",
        "            held.setdefault(uuid, []).append((job, share))\n    return",
        "            held.setdefault(uuid, []).append((job, share // 2))\n    return"),
    "a priority is ignored": Fault(
        "values/queue_order", '"queue_key": (0, priority, number), "priority"', '"queue_key": (0, 0, number), "priority"'),
    "first means first of its priority": Fault(
        "values/queue_order", "keys = [(rank - len(moved) + number, min(", "keys = [(rank, min("),
    "a begin is not waited for": Fault(
        "schedule/plan", "if (job.begin_at or job.retry_at) and", "if job.retry_at and"),
    "a group may have one more": Fault(
        "schedule/quotas", "self.in_group[group.name] >= group.limit", "self.in_group[group.name] > group.limit"),
    "a group's hold is forgotten at a retry": Fault(
        "schedule/quotas", "if group and group.name in self.holds:", "if group and group.name in self.holds and not job.attempts:"),
    "after-any is taken for after": Fault(
        "service/dependencies", 'for flag, named in (("--after", job.after), ("--after-any", job.after_any)))',
        'for flag, named in (("--after", (*job.after, *job.after_any)), ("--after-any", ())))'),
    "after is taken for after-any": Fault(
        "values/changes", "branch = find_branch(state, [job.id]) if status != COMPLETED else {}", "branch = {}"),
    "nothing is kept for who waits for long": Fault(
        "schedule/plan", "            if wants.is_starving(job):\n", "            if False:\n"),
    "a preemptible job is stopped in its first minute": Fault(
        "schedule/preemption", "if find_age(other, now) >= PREEMPT_AFTER_S]", "if find_age(other, now) >= 1.0]"),
    "more make room than must": Fault(
        "schedule/preemption", "    return ends, choose_without(job, ending + ends,",
        "    return others, choose_without(job, ending + ends,"),
    "users take no turns": Fault(
        "values/queue_order", "return head[:3], used.get(user, 0.0), state.last_starts", "return head[:3], state.last_starts"),
    "who comes after a group does not wait for who joins later": Fault(
        "service/dependencies",
        "    yield from update_followers(state, dict.fromkeys(group for job in jobs for group in find_groups(job)))\n",
        "    yield from ()\n"),
    # How jobs end
    "a retry too many": Fault("schedule/ends", "    is_over = again >= job.retries\n", "    is_over = again > job.retries\n"),
    "the backoff does not double": Fault(
        "schedule/ends", "find_backoff_s(config.retry_backoff_seconds, again),", "find_backoff_s(config.retry_backoff_seconds, 0),"),
    "half of the grace time": Fault("hosting/termination", "        if age_s < grace_s:\n", "        if age_s < grace_s / 2:\n"),
    "a warning is sent again": Fault(
        "hosting/hosted_job", "        write_atomic(hosted.disk, self.warned_file, [], is_synced=False)\n", ""),
    "the time limit counts from the submission": Fault(
        "hosting/hosted_job", "            runtime_s=self.hosted.find_runtime_s(),\n",
        "            runtime_s=self.hosted.clock.now() - self.hosted.job.created_at,\n"),
    "a stopped job that ends well has completed": Fault(
        "schedule/ends", "has_succeeded = job.current.stop_cause, result.ended_itself and result.exit_code == 0",
        "has_succeeded = job.current.stop_cause, result.exit_code == 0"),
    "what a job has started is signaled with it": Fault(
        "schedule/signals", "        if process.name in SHELLS or process.name in WRAPPERS:\n            todo += children\n",
        "        todo += children\n"),
    "what is out of memory has a cause of its own no more": Fault(
        "schedule/ends", "    if job.gpus and not evidence.error and (line", "    if job.gpus > 1 and not evidence.error and (line"),
    "a group is held after four failures": Fault(
        "schedule/ends", "    if failures < GROUP_FAILURES:\n", "    if failures <= GROUP_FAILURES:\n"),
    "a GPU is paused for failures that are everywhere": Fault(
        "schedule/ends", "    counted = [end for end in latest if program(end) in good and program(end) not in faulty]\n",
        "    counted = latest\n"),
    # What is kept
    "of a job that was retried the first attempt counts twice": Fault(
        "values/usage", "            for attempt in job.attempts if attempt.started_at is not None]\n",
        "            for attempt in (*job.attempts, *job.attempts[:-1]) if attempt.started_at is not None]\n"),
    "unique forgets what has completed": Fault(
        "service/admission", "if job.status not in (FAILED, CANCELLED)}", "if job.status not in FINAL}"),
    "a key is forgotten when its job has ended": Fault(
        "service/admission", "if job.key == key] if key else []", "if job.key == key and job.status not in FINAL] if key else []"),
    "the latest are forgotten": Fault(
        "values/changes", "    for job in reversed(list_finished(state)):\n", "    for job in list_finished(state):\n"),
    "the jobs of all users are counted together": Fault(
        "values/changes", "        key = job.user, any(attempt.started_at", '        key = "", any(attempt.started_at'),
    "an attempt forgets its exit code when the next begins": Fault(
        "values/job", "    earlier = job.attempts\n",
        "    earlier = tuple(replace(attempt, exit_code=None) for attempt in job.attempts)\n"),
    "what ran before a kill is not told": Fault(
        "service/gpu_history",
        "            self.ended.extend(self.store.state.jobs.values())       # a killed service may not have written the last\n", ""),
    # Turns with other users: see boxes.py
    "a lapse ends no turn": Fault(
        "schedule/turns", "        resting[uid] = max(resting.get(uid, 0.0), now + REST_FACTOR * spent_s)\n",
        "        pass\n"),
    "a newcomer is owed the past": Fault(
        "schedule/turns", "            had[user.uid] = max(had.get(user.uid, first), first)\n",
        "            had[user.uid] = had.get(user.uid, 0.0) - 1000.0\n"),
    "nothing is left to who collects": Fault(
        "schedule/turns", "        elif collector is None and may_collect(competing[uid], want):\n", "        elif False:\n"),
    "what others have had is not counted": Fault(
        "schedule/turns", "        if user.uid in former and user.uid in had:\n",
        "        if user is users[0] and user.uid in former and user.uid in had:\n"),
    # What is told
    "what is gone stays in a view": Fault(
        "views/api_json", "            **{key: None for key in old if key not in new}}", "            }"),
    "a view has others' rows": Fault(
        "service/overview", "told = [caller.show(job.user, row) for job, row in", "told = [row for job, row in"),
    "a hook runs again after a restart": Fault("service/hooks", "        if job.is_hook_due:\n", "        if not job.number:\n"),
    "the end of a group is told at once": Fault(
        "service/hooks", "default=now) + GROUP_QUIET_S - now", "default=now) - now"),
    "a begin that has passed is a reason": Fault(
        "schedule/plan", "    if find_delay_s(job, now):\n        begin_at",
        "    if find_delay_s(job, now) or job.begin_at:\n        begin_at"),
    "places are counted from one": Fault(
        "service/job_serializer", "enumerate(queue.walk(state.queued))}", "enumerate(queue.walk(state.queued), 1)}"),
}


def put_in(name: str) -> None:
    """Have the histories run on a nexus.py with this fault."""
    fault = FAULTS[name]
    assert fault.count_places() == 1, f"src/{fault.room}.py has {fault.count_places()} such places: {fault.piece}"
    before, banner, rest = NEXUS.read_text().partition(f"# ==== src/{fault.room}.py ====\n")
    assert rest.count(fault.piece), f"nexus.py is not what src makes: {fault.piece}"
    spec = importlib.util.spec_from_loader("nexus", loader=None, origin=str(NEXUS))
    assert spec
    module = types.ModuleType("nexus")
    module.__file__, module.__spec__ = str(NEXUS), spec
    sys.modules["nexus"] = module
    source = before + banner + rest.replace(fault.piece, fault.wrong, 1)
    exec(compile(source, str(NEXUS), "exec"), vars(module))

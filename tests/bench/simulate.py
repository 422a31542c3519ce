#!/usr/bin/env python3
"""A made-up day of a machine with 64 GPUs, played through plan(); run by hand: python3 tests/bench/simulate.py [SEED]

10,000 jobs of all sizes come with the rhythm of a day, for 92 % of what the GPUs can do in it.  The same day is played by
nexus (a job that has waited for reserve_after_seconds gets GPUs kept for it, and short jobs slip in), by plain FIFO (nobody
overtakes the head of the queue) and by plain skip-ahead (whatever fits starts: nothing is ever kept).

Then the estimates: at the submission of every 25th job with --expect, nexus is asked when it will start, as `nexus queue`
does.  An estimate is good when it is off by at most 20 % of the real wait, or by at most a minute.
"""
from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP), str(TOP / "tests" / "support")]
from replay import Replay  # noqa: E402

import nexus  # noqa: E402

GPUS, JOBS, DAY_S = 64, 10000, 86400.0
LOAD = 0.92                                 # of what the GPUs can do in the day
RHYTHM = 0.2                                # so much more than in the mean comes in the afternoon, and so much less at night
SIZES = {0.25: 8, 0.5: 12, 1: 50, 2: 15, 4: 10, 8: 5}        # GPUs: percent of the jobs
EXPECTED = 0.9                              # of the jobs say how long they take, right within EXPECT_ERROR
EXPECT_ERROR = 0.15
SAMPLE = 25                                 # every so many-th of them is asked for
GOOD_SHARE, GOOD_S = 0.2, 60.0
NEVER = 31536000


class Arrival(nexus.Value):
    at: float
    job_id: str
    gpus: float
    run_time: float
    expected: float | None


def make_day(seed: int) -> list[Arrival]:
    """The jobs of the day, in the order in which they come; most in the afternoon, fewest at night."""
    source = random.Random(seed)
    times: list[float] = []
    while len(times) < JOBS:
        at = source.uniform(0, DAY_S)
        if source.uniform(0, 1 + RHYTHM) < 1 - RHYTHM * math.cos(2 * math.pi * (at / DAY_S - 2 / 24)):
            times.append(at)
    sizes = source.choices(list(SIZES), list(SIZES.values()), k=JOBS)
    run_times = [source.lognormvariate(0, 1.0) for _ in range(JOBS)]
    scale = LOAD * GPUS * DAY_S / sum(size * run_time for size, run_time in zip(sizes, run_times))
    made = []
    for number, at in enumerate(sorted(times)):
        run_time = max(1.0, run_times[number] * scale)
        says = source.random() < EXPECTED
        expected = run_time * source.uniform(1 - EXPECT_ERROR, 1 + EXPECT_ERROR)
        made.append(Arrival(at, f"j{number}", sizes[number], run_time, expected if says else None))
    return made


class Fifo(Replay):
    """Nobody overtakes the head of the queue."""

    def decide(self) -> nexus.Plan:
        starts = []
        capacities = nexus.list_capacities(self.state.running.values(), self.gpus, self.config.gpu, self.now, {})
        for job in nexus.list_pending(self.state):
            chosen = nexus.choose_gpus(job, capacities, self.config.gpu, self.now)
            if chosen is None:
                break
            for one, share in zip(chosen, nexus.list_shares(job)):
                one.take(job, share, self.now)
            starts.append(nexus.Start(job.id, tuple(one.gpu.index for one in chosen), tuple(one.gpu.uuid for one in chosen)))
        return nexus.Plan(tuple(starts))


class Outcome(nexus.Value):
    name: str
    waits: dict[str, float]
    utilization: float                      # until the last job has ended
    day_utilization: float                  # within the day
    took_s: float
    estimates: dict[str, tuple[float | None, float]]         # job: (estimated wait, how long it took to estimate)


def make_gpus() -> list[nexus.Gpu]:
    return [nexus.Gpu(index, f"GPU-{index:02}", "H100", 81559.0, 0.0) for index in range(GPUS)]


def play(name: str, day: list[Arrival], replay: Replay, samples: Sequence[str] = ()) -> Outcome:
    """Play the day to the end of its last job; estimate the start of the sampled ones as they come."""
    began, estimated_s = time.perf_counter(), 0.0
    estimates = {}
    asked = set(samples)
    coming = 0
    while coming < len(day) or replay.state.running:
        upcoming = replay.next_event_at()
        if coming < len(day) and (upcoming is None or day[coming].at <= upcoming):
            it = day[coming]
            coming += 1
            replay.advance(it.at)
            replay.add(it.job_id, it.run_time, gpus=it.gpus, expected_time=it.expected)
            if it.job_id in asked:
                before = time.perf_counter()
                estimates[it.job_id] = estimate_wait(replay, it.job_id), time.perf_counter() - before
                estimated_s += time.perf_counter() - before
        else:
            assert upcoming is not None
            replay.advance(upcoming)
        replay.start_jobs()
    took_s = time.perf_counter() - began - estimated_s
    waits = {it.job_id: replay.started_at[it.job_id] - it.at for it in day}
    end = max(replay.ended_at.values())
    work = sum(it.gpus * it.run_time for it in day)
    in_day = sum(it.gpus * max(0.0, min(DAY_S, replay.ended_at[it.job_id]) - replay.started_at[it.job_id]) for it in day)
    return Outcome(name, waits, work / (GPUS * (end - day[0].at)), in_day / (GPUS * DAY_S), took_s, estimates)


def estimate_wait(replay: Replay, job_id: str) -> float | None:
    """In how many seconds a job will start, as GET /queue would say; None when it says nothing."""
    state = replay.state
    jobs = [*state.running.values(), *nexus.list_pending(state)[:nexus.MAX_ESTIMATED_JOBS]]
    found = nexus.estimate_starts(jobs, (), nexus.know_run_times(jobs, ()), replay.gpus, replay.config, replay.now)
    return found[job_id] - replay.now if job_id in found else None


def report(outcomes: list[Outcome], day: list[Arrival]) -> None:
    many = [it.job_id for it in day if it.gpus > 1]
    eights = [it.job_id for it in day if it.gpus == 8]
    print(f"{'':<34}{'GPU utilization':>16}{'in the day':>12}{'mean wait':>12}{'worst wait, 2+ GPUs':>21}{'mean wait, 8 GPUs':>19}"
          f"{'took':>9}")
    for one in outcomes:
        print(f"{one.name:<34}{one.utilization:>16.1%}{one.day_utilization:>12.1%}{statistics.mean(one.waits.values()):>10.0f} s"
              f"{max(one.waits[job_id] for job_id in many):>19.0f} s{statistics.mean(one.waits[job_id] for job_id in eights):>17.0f} s"
              f"{one.took_s:>7.1f} s", flush=True)


def report_estimates(one: Outcome) -> None:
    given = {job_id: wait for job_id, (wait, _) in one.estimates.items() if wait is not None}
    print(f"{len(one.estimates)} jobs with --expect were asked for at their submission; {len(given)} got an estimate, in "
          f"{statistics.mean(took for _, took in one.estimates.values()) * 1000:.0f} ms each")
    if not given:
        return

    def share(ids: list[str]) -> str:
        good = sum(abs(given[job_id] - one.waits[job_id]) <= max(GOOD_S, GOOD_SHARE * one.waits[job_id]) for job_id in ids)
        return f"{good / len(ids):.1%} of {len(ids)}" if ids else "none"

    print(f"within {GOOD_SHARE:.0%} of the real wait or {GOOD_S:g} s: {share(list(given))} (>= 80 %)")
    for text, least, most in (("up to 1 min", 0, 60), ("1 to 10 min", 60, 600), ("over 10 min", 600, math.inf)):
        print(f"  that waited {text}: {share([job_id for job_id in given if least <= one.waits[job_id] < most])}, of "
              f"{sum(least <= one.waits[job_id] < most for job_id in one.estimates)} asked for")
    for text, sizes in (("below 1 GPU", (0.25, 0.5)), ("1 GPU", (1,)), ("2 and more GPUs", (2, 4, 8))):
        print(f"  for {text}: {share([job_id for job_id in given if SIZE_OF[job_id] in sizes])}")
    late = [one.waits[job_id] - wait for job_id, wait in given.items()]
    print(f"  real wait less estimated: median {statistics.median(late):.0f} s, mean {statistics.mean(late):.0f} s, "
          f"worst {max(late, key=abs):.0f} s")


SIZE_OF: dict[str, float] = {}


def main() -> None:
    seed = int(sys.argv[1]) if sys.argv[1:] else 1
    day = make_day(seed)
    SIZE_OF.update({it.job_id: it.gpus for it in day})
    config = nexus.parse_config({}, "")
    skipping = nexus.parse_config({"jobs": {"reserve_after_seconds": NEVER}}, "")
    print(f"seed {seed}: {JOBS} jobs in a day on {GPUS} GPUs, run time {statistics.median(it.run_time for it in day):.0f} s in the median, "
          f"{max(it.run_time for it in day):.0f} s at most")
    ours = play("nexus (reservation + backfill)", day, Replay(make_gpus(), config), choose_samples(day))
    report([ours, play("plain FIFO (the head blocks)", day, Fifo(make_gpus(), config)),
            play("plain skip-ahead (nothing kept)", day, Replay(make_gpus(), skipping))], day)
    print(f"\nEstimates, where {EXPECTED:.0%} of the jobs say how long they take, and nothing is known of the others")
    report_estimates(ours)
    print("\nEstimates, where all jobs do")
    source = random.Random(seed)
    all_say = [nexus.replace(it, expected=it.expected or it.run_time * source.uniform(1 - EXPECT_ERROR, 1 + EXPECT_ERROR)) for it in day]
    report_estimates(play("all say", all_say, Replay(make_gpus(), config), choose_samples(all_say)))


def choose_samples(day: list[Arrival]) -> list[str]:
    return [it.job_id for it in day if it.expected is not None][::SAMPLE]


if __name__ == "__main__":
    main()

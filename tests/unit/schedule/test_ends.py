"""What becomes of a job whose attempt has ended, of its group, and of the GPU that it had."""

import json
import re

import pytest
from makers import NOW, config, running
from plans import failed_attempt, handed

import nexus

OOM = "Traceback\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
LAUNCH = nexus.Result(None, cause="launch", cause_line="cannot fork", may_pass=True)
ENDS = [  # reason, fields of the job, exit code or Result, stderr, keys, status, facts
    ("it went well", {}, 0, "a warning\n", {}, "completed", {"exit_code": 0, "cause": None, "cause_line": None, "signal": None}),
    ("it did not", {}, 3, "x\nValueError: y\n", {}, "failed", {"exit_code": 3, "cause": "exit", "cause_line": "ValueError: y"}),
    ("a signal", {}, 139, "", {}, "failed", {"cause": "signal", "signal": 11, "exit_code": 139}),
    ("somebody stopped it", {"stop_cause": "killed", "stop_line": "by ann"}, 143, "", {}, "cancelled",
     {"cause": "killed", "cause_line": "by ann", "signal": 15}),
    ("its time was up", {"stop_cause": "timeout", "stop_line": "stopped after 2h"}, 143, "", {}, "failed",
     {"cause": "timeout", "cause_line": "stopped after 2h"}),
    ("it had succeeded before it was signaled", {"stop_cause": nexus.PREEMPTED}, nexus.Result(0, ended_itself=True), "", {}, "completed",
     {"cause": None, "exit_code": 0}),
    ("somebody wanted its end", {"stop_cause": "killed"}, nexus.Result(0, ended_itself=True), "", {}, "cancelled", {"cause": "killed"}),
    ("it is retried", {"retries": 1, "attempt": 1}, 3, "", {}, "pending",
     {"retry_at": NOW + 5, "finished_at": NOW, "runtime_seconds": 60.0, "exit_code": 3, "cause": "exit", "exclusive": False}),
    ("the wait doubles", {"retries": 3, "attempts": (failed_attempt(1),)}, 3, "", {}, "pending", {"retry_at": NOW + 10}),
    ("a thousand retries do not wait for ever", {"retries": 1000, "attempts": tuple(failed_attempt(n) for n in range(1, 900))}, 3, "", {},
     "pending",
     {"retry_at": NOW + 3600}),
    ("out of the GPU's memory", {}, 1, OOM, {}, "failed", {"cause": "cuda-oom",
                                                           "cause_line": "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"}),
    ("then it is alone at its next attempt", {"retries": 1}, 1, OOM, {}, "pending", {"exclusive": True}),
    ("it ran out of memory, and coped", {}, 0, OOM, {}, "completed", {"cause": None}),
    ("but not without end", {"attempts": (failed_attempt(1, "launch"),) * 4}, LAUNCH, "", {}, "failed",
     {"cause": "launch", "cause_line": "cannot fork"}),
    ("what will never pass is not tried again", {"retries": 5}, nexus.Result(None, cause="launch", cause_line="cd: no"), "", {}, "failed",
     {"cause": "launch", "cause_line": "cd: no"}),
    ("nor retries launches", {"retries": 2, "attempts": (failed_attempt(1), failed_attempt(2))}, LAUNCH, "", {}, "pending",
     {"retry_at": NOW + 5}),
    ("what was requeued is no failure", {"retries": 1, "attempts": (failed_attempt(1, nexus.REQUEUED),)}, 3, "", {}, "pending",
     {"retry_at": NOW + 5}),
    ("the last signal that has a name", {}, 159, "", {}, "failed", {"cause": "signal", "signal": 31, "exit_code": 159}),
    ("an exit code above those of signals", {}, 160, "", {}, "failed", {"cause": "exit", "signal": None, "exit_code": 160}),
    ("128 is no signal", {}, 128, "", {}, "failed", {"cause": "exit", "signal": None}),
    ("its own time of end", {}, nexus.Result(0, NOW - 7), "", {}, "completed", {"finished_at": NOW - 7}),
    ("never before its start", {}, nexus.Result(0, NOW - 500), "", {}, "completed", {"finished_at": NOW - 60}),
]


@pytest.mark.parametrize("reason, fields, result, stderr, keys, status, facts", ENDS, ids=[case[0] for case in ENDS])
def test_judge_end(reason, fields, result, stderr, keys, status, facts):
    one = running("aaa", (0,), **fields)
    result = result if isinstance(result, nexus.Result) else nexus.Result(result)
    found, told = nexus.judge_end(one, result, nexus.Evidence(stderr), 60.0, config(**keys).jobs, NOW)
    assert (found, {name: told[name] for name in facts}) == (status, facts), reason
    after = nexus.change_job(one, status=found, **told).value
    assert after.status == status and (status == "pending") == (after.retry_at is not None)
    assert after.attempts[-1].runtime_seconds == 60.0 and len(after.attempts) == len(one.attempts)
    assert (after.current == nexus.NO_ATTEMPT) == (status == "pending"), "a job that waits again has nothing of its last attempt"
    kept = json.loads(nexus.encode_json(after))
    assert nexus.decode_row("jobs", "aaa", kept) == after, "the journal can keep it"


LINES = [  # exit code, its stderr, its stdout, the line that tells why it failed
    (1, "ValueError: x\n", "ValueError: y\n", "ValueError: x"), (1, "", "ValueError: y\n", "ValueError: y"),
    (139, "", "ValueError: y\n", None), (139, "ValueError: x\n", "", "ValueError: x"), (0, "ValueError: x\n", "", None),
]


@pytest.mark.parametrize("code, stderr, stdout, line", LINES)
def test_a_line_of_stdout_tells_why_it_failed_where_stderr_does_not(code, stderr, stdout, line):
    told = nexus.judge_end(running("aaa"), nexus.Result(code), nexus.Evidence(stderr, stdout=stdout), 60.0, config().jobs, NOW)[1]
    assert told["cause_line"] == line


GONE, LATE = (nexus.replace(failed_attempt(1, nexus.REQUEUED), pid=pid) for pid in (4711, None))
REBOOTS = [  # its former attempts, seconds until the next one after its machine went down
    ([], 0), ([GONE], 60), ([GONE, GONE], 120), ([GONE] * 20, 3600), ([LATE], 0), ([failed_attempt(1)], 0),
    ([nexus.replace(failed_attempt(1), pid=4711)], 0), ([failed_attempt(1), GONE, LATE], 60),
]


@pytest.mark.parametrize("former, backoff_s", REBOOTS)
def test_who_took_the_machine_down_before_waits_longer_each_time(former, backoff_s):
    one = running("aaa", attempts=(*former, failed_attempt(9, nexus.REQUEUED)))
    assert nexus.find_reboot_backoff_s(one) == backoff_s


@pytest.mark.parametrize("result", [nexus.Result(0), nexus.Result(1, ended_itself=True)], ids=["it was signaled", "it had failed"])
def test_what_was_preempted_waits_again(result):
    one = running("abc", stop_cause=nexus.PREEMPTED, stop_line="job b needs its GPUs")
    assert nexus.judge_end(one, result, nexus.Evidence(""), 60.0, config().jobs, NOW)[0] == "pending"


KILLS = [  # reason, exit code, fields of the job, how many the kernel had ended before and has now, whether that is the cause
    ("one meanwhile", 137, {}, 0, 1, True), ("none", 137, {}, 3, 3, False), ("another signal", 139, {}, 0, 1, False),
    ("an exit", 1, {}, 0, 1, False), ("nexus sent it", 137, {"stop_cause": "timeout"}, 0, 1, False),
    ("unknown before", 137, {}, None, 1, False), ("unknown now", 137, {}, 0, None, False),
]


@pytest.mark.parametrize("reason, code, fields, before, now, is_cause", KILLS, ids=[case[0] for case in KILLS])
def test_whether_the_kernel_lacked_memory(reason, code, fields, before, now, is_cause):
    one, result = running("abc", **fields), nexus.Result(code)
    told = nexus.explain_kill(one, result, before, now)
    assert told == (nexus.Result(137, cause="signal", cause_line=nexus.LACK_OF_MEMORY) if is_cause else result)
    assert nexus.decode("Result", json.loads(nexus.encode_json(told)), is_strict=True) == told, "a node's agent may say it"
    status, facts = nexus.judge_end(one, told, nexus.Evidence("loss 0.5\n"), 60.0, config().jobs, NOW)
    if is_cause:
        assert (status, facts["signal"], facts["cause"], facts["cause_line"]) == (nexus.FAILED, 9, "signal", nexus.LACK_OF_MEMORY)
    elif fields:
        assert facts["cause"] == "timeout"


def test_of_a_failure_of_which_nothing_is_known_nothing_is_told():
    told = nexus.judge_end(running("aaa"), nexus.Result(3), nexus.Evidence(), 60.0, config().jobs, NOW)[1]
    assert (told["cause"], told["cause_line"], told["last_line"], told["log_base"]) == ("exit", None, None, (0, 0))


def test_what_was_seen_of_it_is_kept():
    one, samples = running("aaa", retries=1), {"peak_rss_mib": 5.0, "cpu_seconds": 2.0}
    told = nexus.judge_end(one, nexus.Result(0), nexus.Evidence(samples=nexus.Usage(**samples)), 60.0, config().jobs, NOW)[1]
    assert {name: told[name] for name in samples} == samples
    told = nexus.judge_end(one, nexus.Result(3), nexus.Evidence("x", (12, 1234)), 60.0, config().jobs, NOW)[1]
    assert told["log_base"] == (12, 1234), "its next attempt's part of the logs begins there"


def test_what_went_wrong_with_its_logs_is_told():
    told = nexus.judge_end(running("aaa"), nexus.Result(1), nexus.Evidence("x\n", error="the disk is full"), 60.0, config().jobs, NOW)[1]
    assert (told["cause"], told["cause_line"], told["notes"]) == ("exit", "the disk is full", ())
    one = running("aaa", notes=("umask",))
    told = nexus.judge_end(one, nexus.Result(0), nexus.Evidence(error="the disk is full"), 60.0, config().jobs, NOW)[1]
    assert (told["cause"], told["cause_line"], told["notes"]) == (None, None, ("umask", "the disk is full"))


GROUP_ENDS = [  # reason, group before, (status, cause, whether soon, whether more wait), failures after, part of the hold
    ("the first fails", nexus.Group("g"), ("failed", "exit", True, True), 1, None),
    ("the second", nexus.Group("g", failures=1), ("failed", "exit", True, True), 2, None),
    ("the third", nexus.Group("g", failures=2), ("failed", "exit", True, True), 0,
     "last with: ValueError: x (fix the error, then: nexus resume --group g)"),
    ("it did not fail soon", nexus.Group("g", failures=2), ("failed", "exit", False, True), -1, None),
    ("one went well", nexus.Group("g", failures=2), ("completed", None, True, True), -1, None),
    ("one had gone well before", nexus.Group("g", failures=-1), ("failed", "exit", True, True), -1, None),
    ("one that was killed says nothing", nexus.Group("g", failures=2), ("cancelled", "killed", True, True), 2, None),
    ("nor one whose parent failed", nexus.Group("g", failures=2), ("cancelled", "dependency", True, True), 2, None),
    ("nothing is left to hold", nexus.Group("g", failures=2), ("failed", "exit", True, False), 0, None),
    ("it is held already", nexus.Group("g", hold="x"), ("failed", "exit", True, True), 0, "x"),
]


@pytest.mark.parametrize("reason, group, end, failures, hold", GROUP_ENDS, ids=[case[0] for case in GROUP_ENDS])
def test_count_group_end(reason, group, end, failures, hold):
    status, cause, is_soon, has_pending = end
    made = nexus.count_group_end(group, status, cause, is_soon, "ValueError: x", has_pending)
    assert made.failures == failures and (hold in made.hold if hold else made.hold is None), reason
    assert (made.name, made.limit) == (group.name, group.limit)


# The guard of GPUs


def ends(*words):
    """`A0-` is a failure soon after its start of program A on GPU 0; `+` a success, `~` a failure later; `A01-` on both GPUs;
    `Ax0-` the same program with another argument.  Each began when the one before it ended.
    """
    made = []
    for number, word in enumerate(words):
        command, gpus = re.fullmatch(r"([A-Z][a-z]?)(\d*).", word).groups()
        uuids = tuple(f"GPU-{index}" for index in gpus)
        made.append(nexus.Ended(uuids, " --x ".join(command), word[-1] == "+", word[-1] == "-", NOW + number))
    return made


GUARDS = [  # reason, what ended, in its order, keys, whether GPU 0 is bad
    ("three in a row, two programs, while others ran well elsewhere", ends("A0-", "B0-", "A1+", "B1+", "A0-"), {}, True),
    ("one went well in between", ends("A0-", "B0-", "A1+", "C0+", "A0-"), {}, False),
    ("one program only: it is the program", ends("A0-", "A0-", "B1+", "A0-"), {}, False),
    ("nothing ran well elsewhere", ends("A0-", "B0-", "C0-"), {}, False),
    ("never, if it is off", ends("A0-", "B0-", "A1+", "A0-"), {"guard_failures": 0}, False),
    ("a sweep: one program, which runs elsewhere", ends("Aa0-", "Ab0-", "Ac1+", "Ad0-"), {}, True),
    ("one command only, which runs elsewhere", ends("A0-", "A0-", "A1+", "A0-"), {}, False),
    ("only two of the three run elsewhere", ends("A0-", "B0-", "A1+", "B1+", "C0-"), {}, False),
    ("elsewhere they fail too, only later", ends("A0-", "B0-", "A1~", "B1~", "A0-"), {}, False),
    ("elsewhere one of them fails as soon", ends("A0-", "B0-", "A1+", "B1+", "A1-", "B0-"), {}, False),
    ("they ran well elsewhere only before", ends("A1+", "B1+", "A0-", "B0-", "A0-"), {}, False),
    ("they ran well without a GPU", ends("A0-", "B0-", "A+", "B+", "A0-"), {}, False),
    ("two in a row, where two are enough", ends("A0-", "A1+", "B1+", "B0-"), {"guard_failures": 2}, True),
    ("a job on several GPUs ran well there", ends("A0-", "B0-", "C01+", "A1+", "A0-"), {}, False),
]


@pytest.mark.parametrize("reason, ended, keys, expected", GUARDS, ids=[case[0] for case in GUARDS])
def test_find_bad_gpu(reason, ended, keys, expected):
    found = nexus.find_bad_gpu(ended, "GPU-0", config(**keys).gpu)
    assert (found is not None) is expected, (reason, found)
    assert not found or "in a row failed there within 10 s of their start" in found


def ended(state, reason="None", **fields):
    return nexus.SlurmJob("12", state, reason, "n1", NOW - 10, NOW, **fields)


GOOD, BAD, TERMINATED = (nexus.Result(code, NOW, 2.5) for code in (0, 3, 143))
NO_TREE = nexus.Result(None, NOW, 0.0, "launch", "no tree")
SLURM_ENDS = [  # reason, what Slurm says, job.sh's result, whether it began, Slurm's words, (exit code, cause, a word of the line)
    ("well", ended("COMPLETED"), GOOD, True, "", (0, None, None)),
    ("an exit code", ended("COMPLETED"), BAD, True, "", (3, None, None)),
    ("it could not be launched there", ended("COMPLETED"), NO_TREE, True, "", (None, "launch", "no tree")),
    ("the time was up", ended("TIMEOUT", "TimeLimit"), TERMINATED, True, "JOB 12 DUE TO TIME LIMIT", (143, "timeout", "DUE TO TIME LIMIT")),
    ("the time was up, without words", ended("TIMEOUT", "TimeLimit"), None, True, "", (None, "timeout", "was TIMEOUT (TimeLimit) on n1")),
    ("and it ended well all the same", ended("TIMEOUT"), GOOD, True, "", (0, "timeout", "TIMEOUT")),
    ("a deadline", ended("DEADLINE"), TERMINATED, True, "", (143, "timeout", "DEADLINE")),
    ("memory", ended("OUT_OF_MEMORY"), nexus.Result(137, NOW, 2.5), True, "Detected 1 oom-kill event(s)", (137, "host-memory", "oom-kill")),
    ("memory, where no cgroup tells", ended("FAILED", "JobLaunchFailure"), None, True, "Exceeded job memory limit",
     (None, "host-memory", "memory limit")),
    ("its node", ended("NODE_FAIL", "NodeDown"), None, True, "", (None, "node-fail", "NODE_FAIL (NodeDown) on n1")),
    ("its node, before it began", ended("BOOT_FAIL"), None, False, "", (None, "node-fail", "BOOT_FAIL")),
    ("a more urgent job", ended("PREEMPTED"), TERMINATED, True, "", (143, "preempted", "PREEMPTED")),
    ("somebody", ended("CANCELLED"), TERMINATED, True, "JOB 12 CANCELLED AT", (143, "killed", "CANCELLED AT")),
    ("job.sh was killed", ended("FAILED", "NonZeroExitCode"), None, True, "", (None, "session-lost", "killed on n1")),
    ("nobody saw the log folder", ended("FAILED", "NonZeroExitCode"), None, False, "cannot open",
     (None, "launch", "file system that the nodes")),
    ("no node can", ended("FAILED", "BadConstraints"), None, False, "", (None, "launch", "BadConstraints")),
    ("forgotten, with a result", None, BAD, True, "", (3, None, None)),
    ("forgotten, without", None, None, True, "", (None, "session-lost", "not known")),
    ("forgotten, and somebody had cancelled it", None, TERMINATED, True, "JOB 12 CANCELLED AT 17:01", (143, "killed", "CANCELLED AT")),
    ("it ended well all the same", None, GOOD, True, "JOB 12 CANCELLED AT 17:01", (0, "killed", "CANCELLED AT")),
    ("its job.sh too was killed", None, None, True, "JOB 12 CANCELLED AT 17:01", (None, "killed", "CANCELLED AT")),
    ("forgotten, and the time was up", None, TERMINATED, True, "CANCELLED AT 17:01 DUE TO TIME LIMIT", (143, "timeout", "TIME LIMIT")),
    ("forgotten, and its node was down", None, None, True, "CANCELLED AT 17:01 DUE TO NODE FAILURE, SEE", (None, "node-fail", "NODE")),
    ("forgotten, and a more urgent job came", None, TERMINATED, True, "CANCELLED AT 17:01 DUE TO PREEMPTION", (143, "preempted", "DUE")),
    ("forgotten, and out of memory", None, nexus.Result(137), True, "Detected 1 oom-kill event(s)", (137, "host-memory", "oom-kill")),
]


@pytest.mark.parametrize("reason, seen, result, has_begun, words, wanted", SLURM_ENDS, ids=[case[0] for case in SLURM_ENDS])
def test_how_a_slurm_job_ended(reason, seen, result, has_begun, words, wanted):
    made = nexus.judge_slurm_end(seen, nexus.Claim(4711, 100) if has_begun else None, result, 60, words, "/h/logs/job_abc").result
    assert (made.exit_code, made.cause) == wanted[:2] and (wanted[2] or "") in (made.cause_line or "")
    if seen and not result:                 # Slurm alone tells its times
        assert (made.finished_at, made.runtime_seconds) == (NOW, 0.0 if made.cause == "launch" else 10.0)


ENDED, KILLED = (nexus.SlurmJob("12", state, nodes="n1") for state in ("COMPLETED", "CANCELLED"))
DECISIONS = [  # reason, what Slurm says, who has claimed the attempt, result, so long ago (s), what it is
    ("it ended", ENDED, "begun", GOOD, 0, "over"),
    ("its result is on its way", ENDED, "begun", None, 59, None),
    ("its result has not come", ENDED, "begun", None, 60, "over"),
    ("it ended before it began", ENDED, "not begun", None, 3, "over"),
    ("or is that only not seen yet", ENDED, "not begun", None, 2, None),
    ("it found its attempt taken", ENDED, "ours", None, 0, "requeued"),
    ("its node went down", ended("NODE_FAIL"), "begun", None, 0, "over"),
    ("its node did not come up", ended("BOOT_FAIL"), "not begun", None, 0, "over"),
    ("somebody cancelled it", KILLED, "begun", TERMINATED, 0, "over"),
    ("it was cancelled before it began", KILLED, "not begun", None, 3, "over"),
    ("it never came there", None, "not begun", None, 0, "requeued"),
    ("the claim was the last that a service did", None, "ours", None, 0, "requeued"),
    ("it ended before it wrote its claim", ENDED, "open", None, 60, "requeued"),
    ("or is that only not seen yet, though it is written", ENDED, "open", None, 59, None),
    ("it is queued again before it wrote its claim", ended(nexus.REQUEUED_BY_SLURM), "open", None, 60, "requeued"),
    ("forgotten before it wrote its claim", None, "open", None, 60, "requeued"),
    ("or is it forgotten that it runs", None, "open", None, 59, None),
    ("cancelled before it wrote its claim", KILLED, "open", None, 3, "over"),
    ("a claim that is not seen yet, with a result", ENDED, "open", GOOD, 0, "over"),
    ("forgotten, with a result", None, "begun", BAD, 0, "over"),
    ("forgotten, without", None, "begun", None, 3, "over"),
]


@pytest.mark.parametrize("reason, seen, claim, result, waited_s, wanted", DECISIONS, ids=[case[0] for case in DECISIONS])
def test_decide(reason, seen, claim, result, waited_s, wanted):
    claim = {"not begun": None, "ours": nexus.OUR_CLAIM, "open": nexus.OPEN_CLAIM, "begun": nexus.Claim(4711, 100)}[claim]
    news = nexus.judge_slurm_end(seen, claim, result, waited_s, "", "/h/logs/job_abc")
    assert (news and ("requeued" if news.requeue else "over")) == wanted and (news is None or news.is_end)


def test_match_slurm_jobs():
    """By the key in the comment; by the id only where somebody has rewritten the comment."""
    live = [handed("aaa", slurm_key="k1", slurm_id="1"), handed("bbb", slurm_key="k2", slurm_id="2"),
            handed("ccc", slurm_key="k3", slurm_id="3")]
    one, two, three = nexus.SlurmJob("9", "PENDING", key="k1"), nexus.SlurmJob("2", "RUNNING"), nexus.SlurmJob("3", "RUNNING", key="")
    assert nexus.match_slurm_jobs(live, [one, two, three]) == {"k1": one, "k2": two}

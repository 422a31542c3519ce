"""The far end of a node's line as the test wants it: a head's Node without an ssh, a process and a wait.

    far.follow(far_end.ended(exit_code=3))      # the head asks, and takes in that n1 says this
    far.follow()                                # and again
"""

import json

import makers

import nexus

FOLLOW = nexus.Node.follow
HELLO = {"machine": "m", "boot_id": "b", "python": "3.11.7", "screen": [], "path": "/nexus.py", "cpu_slots": 4}
GPU = json.loads(nexus.encode_json(makers.gpu(0, uuid="G0")))
RAN = {"pid": 77, "pid_started": 5}
LOG = "eHh4eHh4eHg="                                    # 8 bytes
# "JOBS" stands for what it says of its jobs, "JOB" for the key of one, "NUMBER" for that of the question.
GOOD = {"number": "NUMBER", "now": makers.NOW, "jobs": "JOBS", "folders": {"/": True}, "trouble": "", "gpus": [GPU]}


def of_job(**fields):
    """A reply that says this of the one job there."""
    return {**GOOD, "jobs": [{"key": "JOB", "log_sizes": [0, 0], "log_offsets": [0, 0], "logs": ["", ""], "samples": {}, "rss_mib": None,
                              **fields, "progress": {**RAN, **fields.get("progress", {})}}]}


def ended(**result):
    return of_job(progress={"result": {"exit_code": 0, "runtime_seconds": 1.0, **result}, "is_over": True})


def gpus(*fields):
    return {**GOOD, "gpus": [{**GPU, **one} for one in fields]}


BAD_ENVELOPES = [  # reason, the reply, words of its node's trouble
    ("a text for a number", gpus({"memory_total_mib": "x"}), "memory_total_mib is 'x', and not a number from "),
    ("no number", gpus({"memory_used_mib": float("nan")}), "memory_used_mib is nan"),
    ("a truth for a number", gpus({"memory_used_mib": True}), "memory_used_mib is True"),
    ("no GPU", {**GOOD, "gpus": [None]}, "gpus is None, and not Gpu"),
    ("half a GPU", {**GOOD, "gpus": [{"index": 0, "processes": []}]}, "uuid"),
    ("a GPU far away", gpus({"index": 2**62}), "index is 4611686018427387904, and not a whole number from 0 to 9999"),
    ("a GPU twice", gpus({}, {"uuid": "G1"}), "two GPUs have one name"),
    ("a UUID twice", gpus({}, {"index": 1}), "two GPUs have one name"),
    ("a UUID that is a command", gpus({"uuid": "$(id)"}), "uuid is '$(id)'"),
    ("more of a GPU than there is", gpus({"temper": 1}), "temper is no key of gpus"),
    ("more than an agent says", {**GOOD, "state": {"paused": False}}, "state is no key of the reply"),
    ("too many GPUs", gpus(*[{}] * 5001), "it has more than 5000 GPUs and processes on them"),
    ("too many processes", gpus({"processes": [{"pid": 1, "memory_mib": 1}] * 2500}, {"processes": [{}] * 2500}),
     "it has more than 5000 GPUs and processes on them"),
    ("more GPUs than a machine has", gpus(*[{"index": number, "uuid": f"G{number}"} for number in range(257)]),
     "it has more than 256 GPUs"),
    ("empty lists without end", {**GOOD, "folders": [[]] * 300000}, "its reply has too many parts"),
    ("no time", {**GOOD, "now": -1e19}, "now is -1e+19, and not a number from 0 to 253402300799"),
    ("no list of jobs", {**GOOD, "jobs": {}}, "jobs is dict"),
    ("nothing of jobs", {key: GOOD[key] for key in GOOD if key != "jobs"}, "jobs is None"),
    ("a job that is not its", {**GOOD, "jobs": [{"key": "zzz-1-1", "progress": {}}]}, "it tells of job zzz-1-1, which is not its"),
    ("a job that is a path", {**GOOD, "jobs": [{"key": "../../x-1-1", "progress": {}}]}, "key is '../../x-1-1'"),
    ("a question that was not asked", {**GOOD, "number": 10**6}, "it replies to question 1000000, and "),
    ("no question", {key: GOOD[key] for key in GOOD if key != "number"}, "number is None"),
    ("a question that is none", {**GOOD, "number": -1}, "number is -1"),
    ("a job that is a list", {**GOOD, "jobs": [[]]}, "jobs is list"),
    ("a folder that is neither there nor not", {**GOOD, "folders": {"/": "yes"}}, "folders is str, and not bool"),
    ("nothing", None, "n1 answers what no nexus does"),
    ("no JSON", b"<html>\n", "n1 answers what no nexus does: Expecting value"),
    ("too deep", b'{"a":' * 100000 + b"\n", "n1 answers what no nexus does: it is nested too deeply"),
    ("a number without end", b"9" * 100000 + b"\n", "n1 answers what no nexus does"),
    ("no text", b"\xff\xfe\n", "n1 answers what no nexus does"),
]
BAD_JOBS = [  # reason, the reply, words of the job's note
    ("its command, with a start that did not work (the hole)",
     of_job(samples={"command": "id > /tmp/PWNED", "only_node": "", "cwd": "/tmp"},
            progress={"result": {"exit_code": None, "cause": "launch", "may_pass": True}, "is_over": True}), "is no key of samples"),
    ("its status", of_job(samples={"status": "x"}), "status is no key of samples"),
    ("its history", of_job(samples={"status_history": "abc"}), "status_history is no key of samples"),
    ("its id", of_job(samples={"id": "zzzz"}), "id is no key of samples"),
    ("a share that is no number", of_job(samples={"cpu_seconds": "much"}), "cpu_seconds is 'much'"),
    ("an end far away", ended(finished_at=1e19), "finished_at is 1e+19, and not a number from 0 to 253402300799"),
    ("an end before all time", ended(finished_at=-1e19), "finished_at is -1e+19"),
    ("no exit code", ended(exit_code=2**64 - 1), "exit_code is 18446744073709551615, and not a whole number from 0 to 255"),
    ("a text for an exit code", ended(exit_code="1"), "exit_code is '1'"),
    ("it ran for ever", ended(runtime_seconds=1e300), "runtime_seconds is 1e+300"),
    ("a cause of the head's", ended(cause="preempted"), "cause is 'preempted', and not one of launch, bounce"),
    ("a stop of the head's", of_job(progress={"stop": ["killed", "x"]}), "stop is 'killed', and not one of timeout"),
    ("a pid that is none", of_job(progress={"pid": 2**62}), "pid is 4611686018427387904"),
    ("a session with a command", of_job(progress={"session": "1.x;id"}), "session is '1.x;id'"),
    ("a file that is an option", of_job(progress={"files": "-oProxyCommand=id"}), "files is '-oProxyCommand=id'"),
    ("odd sizes", of_job(log_sizes=[1]), "log_sizes is list, and not tuple[FileSize, FileSize]"),
    ("no size", of_job(log_sizes=[2**62, 0]), "log_sizes is 4611686018427387904"),
    ("no base64", of_job(logs=["?", ""]), "base64"),
    ("more output than there is", of_job(log_sizes=[4, 0], logs=[LOG, ""]), "8 bytes of a log of 4 are sent, after 0"),
    ("output without a size", of_job(log_sizes=None, logs=[LOG, ""]), "8 bytes of a log of 0 are sent, after 0"),
    ("output from before it", of_job(log_sizes=[4, 0], log_offsets=[-4, 0], logs=[LOG, ""]), "log_offsets is -4"),
    ("output from after it", of_job(log_sizes=[8, 0], log_offsets=[4, 0], logs=[LOG, ""]),
     "8 bytes of a log of 8 are sent, after 4"),
    ("an attempt beside its key", of_job(attempt=2), "attempt is no key of job "),
    ("no progress", {**GOOD, "jobs": [{"key": "JOB"}]}, "progress"),
    ("nothing", {**GOOD, "jobs": []}, "nothing is said of it"),
]
LATE = [  # reason, what it says of jobs
    ("of none", []), ("of one that is not its any more", [{"key": "zzz-1-1", "progress": {}}]),
]


def fill(reply, number, keys):
    """The bytes of a reply to the question of this number, about the jobs of these keys."""
    if isinstance(reply, bytes):
        return reply
    jobs = [{"key": key, "progress": RAN, "log_sizes": [0, 0]} for key in keys]
    text = json.dumps(reply).replace('"JOBS"', json.dumps(jobs)).replace('"NUMBER"', str(number))
    return text.replace('"JOB"', json.dumps(keys[0] if keys else "abc-1-1")).encode()


class FarEnd:
    """What stands in for an AgentLine, and for the machine behind it."""

    def __init__(self):
        self.node, self.reply, self.questions = None, GOOD, []
        self.hello = nexus.Hello(**{**HELLO, "screen": ()})

    def connect(self, *_):
        return self

    def ask(self, question):
        self.questions.append(json.loads(nexus.encode_json(question)))

    def read_line(self, silence_s):
        question = self.questions[-1]
        return fill(self.reply, question["number"], [wanted["key"] for wanted in question["jobs"]])

    def close(self):
        """It is connected again with the next question."""

    def follow(self, *reply):
        """Have the head ask and take in a reply, this one from now on; returns the pause that it makes then."""
        [self.reply] = reply or [self.reply]
        return FOLLOW(self.node)

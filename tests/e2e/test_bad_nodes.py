"""A node that says what no agent does: nothing of its head changes by that, and nothing else of it suffers."""

import json
import os
import random
import subprocess
import sys
import threading
import time

import live
import makers
import pytest
import test_service

import nexus

world = test_service.world

# What stands in for ssh: an agent with one GPU, where each job runs.  To the second look and those after it, it replies with
# what is in BAD: a list of replies as JSON, one after the other, or if that is no list the bytes themselves.  "JOBS" in a
# reply stands for what it would say of its jobs; so do "JOB" for the key of one, and "NUMBER" for that of the question.
SSH = """\
#!{python} -IS
import json, os, sys, time
good = json.loads(os.environ["GOOD"])
print("a greeting of the login\\nnexus-agent: begins", flush=True)
print(os.environ["HELLO"], flush=True)
looks = 0
for line in sys.stdin:
    if not line.startswith('{{"number"'):
        continue
    looks += 1
    with open(os.environ["REPLIES"], "a") as file:
        file.write("x")
    question = json.loads(line)
    jobs = [dict(key=one["key"], progress=dict(pid=77, pid_started=5), log_sizes=[0, 0]) for one in question["jobs"]]
    if looks > 1 and os.path.exists(os.environ["BAD"]):
        with open(os.environ["BAD"], "rb") as file:
            content = file.read()
        if content[:1] == b"[":
            replies = json.loads(content)
            reply = json.dumps(replies[(looks - 2) % len(replies)]).replace('"JOBS"', json.dumps(jobs))
            reply = reply.replace('"NUMBER"', str(question["number"]))
            content = reply.replace('"JOB"', json.dumps(jobs[0]["key"] if jobs else "abc-1-1")).encode() + b"\\n"
            time.sleep(0.02)
        while True:
            os.write(1, content)
            if content[-1:] == b"\\n" or not content:
                break
        if not content:
            sys.exit("it had enough of nexus")
    else:
        time.sleep(0.02)
        print(json.dumps(dict(good, number=question["number"], jobs=jobs)), flush=True)
"""
HELLO = {"machine": "m", "boot_id": "b", "python": "3.11.7", "screen": [], "path": "/nexus.py", "cpu_slots": 4}
GPU = json.loads(nexus.encode_json(makers.gpu(0, uuid="G0")))
GOOD = {"number": "NUMBER", "now": makers.NOW, "jobs": "JOBS", "folders": {"/": True}, "trouble": "", "gpus": [GPU]}
RAN = {"pid": 77, "pid_started": 5}


def of_job(**fields):
    """A reply that says this of the one job there."""
    return {**GOOD, "jobs": [{"key": "JOB", "log_sizes": [0, 0], "log_offsets": [0, 0], "logs": ["", ""], "samples": {}, "rss_mib": None,
                              **fields, "progress": {**RAN, **fields.get("progress", {})}}]}


def ended(**result):
    return of_job(progress={"result": {"exit_code": 0, "runtime_seconds": 1.0, **result}, "is_over": True})


def gpus(*fields):
    return {**GOOD, "gpus": [{**GPU, **one} for one in fields]}


LOG = "eHh4eHh4eHg="                                    # 8 bytes
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
    ("an endless line", b" " * 2**20, "its reply is too long"),
    ("its end", b"", "it had enough of nexus"),
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
    ("output from after it", of_job(log_sizes=[8, 0], log_offsets=[4, 0], logs=[LOG, ""]), "8 bytes of a log of 8 are sent, after 4"),
    ("an attempt beside its key", of_job(attempt=2), "attempt is no key of job "),
    ("no progress", {**GOOD, "jobs": [{"key": "JOB"}]}, "progress"),
    ("nothing", {**GOOD, "jobs": []}, "nothing is said of it"),
]


def make_ssh(folder):
    """Put the stand-in for ssh there; what is to be in the environment for it."""
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    ssh.write_text(SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    return {"GOOD": json.dumps(GOOD), "HELLO": json.dumps(HELLO), "BAD": str(folder / "bad"), "REPLIES": str(folder / "replies")}


@pytest.fixture
def bad(world, tmp_path, monkeypatch):
    """(a world with a GPU of its own and the node n1, the file with its bad reply)."""
    environ = make_ssh(tmp_path)
    monkeypatch.setattr(nexus, "RECONNECT_S", (0.01, 0.05))
    w = world(gpus=1)
    w.service.environ.update(environ, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PATH", w.service.environ["PATH"])
    w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
    w.node = w.service.pool.nodes["n1"]
    live.until(lambda: w.node.error is None, lambda: w.node.error)
    yield w, tmp_path / "bad"
    w.node.end()


def write(file, reply):
    """Have the node reply so, as a whole and at once."""
    aside = file.with_suffix(".new")
    aside.write_bytes(reply if isinstance(reply, bytes) else json.dumps(reply if isinstance(reply, list) else [reply]).encode())
    os.replace(aside, file)


@pytest.mark.parametrize("reason, reply, words", BAD_ENVELOPES, ids=[case[0] for case in BAD_ENVELOPES])
def test_a_bad_reply_closes_its_node_alone(bad, reason, reply, words):
    w, file = bad
    away, here = w.add(node="n1", gpus=0), w.add(node=w.service.node)
    write(file, reply)
    live.until(lambda: (trouble := w.node.error) and words in trouble.message, lambda: w.node.error)
    w.turn()
    assert w.job(away).status == "pending" and w.job(here).status == "running"
    file.unlink()
    live.until(lambda: w.node.error is None, "it to be well again")
    assert w.service.failure_count == 0


@pytest.fixture
def away(bad):
    """(a world, the file with the bad reply, the id of a job that runs on n1)."""
    w, file = bad
    job_id = w.add(node="n1", gpus=0)
    live.until(lambda: w.turn() or w.job(job_id).current.pid == 77, lambda: w.job(job_id))
    return w, file, job_id


@pytest.mark.parametrize("reason, reply, words", BAD_JOBS, ids=[case[0] for case in BAD_JOBS])
def test_a_bad_report_of_a_job_changes_nothing(away, reason, reply, words):
    w, file, job_id = away
    before, seq = w.job(job_id), w.store.state.seq
    write(file, reply)
    live.until(lambda: w.turn() or any(words in note for note in w.api(job_id)["notes"]), lambda: w.api(job_id))
    assert w.job(job_id) == before and w.store.state.seq == seq, "nothing of it is recorded"
    assert w.api(job_id)["unknown_since"] and w.node.error is None
    next_id = w.add(node="n1", gpus=0)
    live.until(lambda: w.turn() or "answers what no nexus does" in w.api(next_id)["waiting_for"], lambda: w.api(next_id))
    assert not os.path.exists(w.folder_of(job_id) / "stdout.log")
    file.unlink()
    live.until(lambda: w.turn() or w.job(next_id).status == "running", lambda: w.api(next_id))
    shown = w.api(job_id)
    assert (shown["unknown_since"], len(shown["notes"]), w.service.failure_count) == (None, 0, 0)


def test_what_is_said_twice_counts_once(away):
    w, file, job_id = away
    reply = of_job(progress={"processes_left": 3})
    write(file, {**reply, "jobs": [*reply["jobs"], *of_job(progress={"processes_left": 4})["jobs"]]})
    live.until(lambda: w.turn() or w.job(job_id).current.processes_left, lambda: w.node.error)
    assert w.job(job_id).current.processes_left == 3


PIECES = [  # reason, size of its log there, where its 8 bytes begin in that, how many arrive
    ("what comes first", 8, 0, 8), ("a gap before it", 12, 4, 0),
]


@pytest.mark.parametrize("reason, size, offset, arrived", PIECES, ids=[case[0] for case in PIECES])
def test_output_is_taken_once_and_in_its_order(away, reason, size, offset, arrived):
    """Each reply stands alone: one that comes again, or too early, changes nothing, and is no fault of the node."""
    w, file, job_id = away
    write(file, of_job(log_sizes=[size, 0], log_offsets=[offset, 0], logs=[LOG, ""]))
    before = file.with_name("replies").stat().st_size
    live.until(lambda: w.turn() or file.with_name("replies").stat().st_size > before + 5, "replies")
    path = w.folder_of(job_id) / "stdout.log"
    assert (path.stat().st_size if path.exists() else 0) == arrived and not w.api(job_id)["notes"] and w.node.error is None


LATE = [  # reason, what it says of jobs
    ("of none", []), ("of one that is not its any more", [{"key": "zzz-1-1", "progress": {}}]),
]


@pytest.mark.parametrize("reason, jobs", LATE, ids=[case[0] for case in LATE])
def test_a_late_reply_counts_for_what_it_tells(away, reason, jobs):
    """It may be older than the job, and know another that is over by now."""
    w, file, job_id = away
    job = w.job(job_id)
    write(file, {**GOOD, "number": 0, "jobs": jobs})
    live.until(lambda: w.turn() or w.node.heard_number == 0, "a late reply")
    assert w.node.error is None and w.job(job_id) == job
    assert not w.api(job_id)["notes"] and w.api(job_id)["unknown_since"] is None
    write(file, {**of_job(progress={"processes_left": 3}), "number": 0})
    live.until(lambda: w.turn() or w.job(job_id).current.processes_left == 3, lambda: w.node.error)


def test_times_of_a_node_are_within_those_of_the_job(away):
    w, file, job_id = away
    write(file, {**ended(finished_at=4e9, runtime_seconds=1e11), "now": 0.0})
    w.clock.pass_(10)
    live.until(lambda: w.turn() or w.job(job_id).status == "completed", lambda: w.api(job_id))
    ran = w.job(job_id).current
    assert ran.started_at <= ran.finished_at <= w.clock.now() and ran.runtime_seconds <= w.clock.now() - ran.started_at


def test_a_flood_of_notes_is_cut(away):
    w, file, job_id = away
    size, clock = w.store.journal.size, w.clock.now()
    replies = [of_job(progress={"notes": [f"{number} {turn} " + "n" * 50000 for number in range(30)]}) for turn in range(20)]
    file.write_text(json.dumps(replies))
    live.until(lambda: w.turn() or w.job(job_id).current.notes, lambda: w.node.error)
    heard, count = w.node.heard_at, 0
    while count < 40:                                   # replies
        w.turn(seconds=0.01)
        heard, count = w.node.heard_at, count + (w.node.heard_at != heard)
    notes = w.job(job_id).current.notes
    assert len(notes) == nexus.MAX_NOTES and max(map(len, notes)) == nexus.MAX_WORDS
    assert w.store.journal.size - size < 100_000 * (1 + (w.clock.now() - clock) / nexus.NOTES_INTERVAL_S)


def test_notes_that_stay_the_same_are_recorded_once(away):
    w, file, job_id = away
    write(file, of_job(progress={"notes": [f"note {number}" for number in range(50)]}))
    live.until(lambda: w.turn() or w.job(job_id).current.notes, lambda: w.node.error)
    seq = w.store.state.seq
    for _ in range(20):
        w.turn(seconds=nexus.NOTES_INTERVAL_S)
    assert w.store.state.seq == seq and w.job(job_id).current.notes[-1] == "note 49"


HELLOS = [  # reason, what is otherwise, words
    ("an option for ssh", {"screen": ["-oProxyCommand=id"]}, "screen is '-oProxyCommand=id'"),
    ("a variable of its own", {"screen": ["LD_PRELOAD=/x.so"]}, "screen is 'LD_PRELOAD=/x.so'"),
    ("a boot that is a command", {"boot_id": "$(id)"}, "boot_id is '$(id)'"),
    ("no path", {"path": "nexus.py"}, "path is 'nexus.py'"), ("no slots", {"cpu_slots": -1}, "cpu_slots is -1"),
    ("slots without end", {"cpu_slots": float("inf")}, "cpu_slots is inf"), ("more", {"head": "x"}, "head is no key of its first line"),
    ("a list for its machine", {"machine": ["m"]}, "machine is list"),
    ("a long line", {"screen": ["SCREENDIR=/" + "x" * 4000] * 20}, "its reply is too long"),
]


@pytest.mark.parametrize("reason, fields, words", HELLOS, ids=[case[0] for case in HELLOS])
def test_a_bad_first_line(world, tmp_path, monkeypatch, reason, fields, words):
    environ = make_ssh(tmp_path)
    w = world(gpus=0)
    w.service.environ.update(environ, HELLO=json.dumps({**HELLO, **fields}), PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PATH", w.service.environ["PATH"])
    w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
    node = w.service.pool.nodes["n1"]
    live.until(lambda: node.error and words in node.error.message, lambda: node.error)
    node.end()


# A node that is not in step with its head

FLOOD = """\
#!{python} -IS
import json, os, time
print("nexus-agent: begins")
print(os.environ["HELLO"], flush=True)
while not os.path.exists(os.environ["BAD"]):
    print(json.dumps(dict(json.loads(os.environ["GOOD"]), number=1, jobs=[])), flush=True)
    time.sleep(0.001)
"""
DRIP = """\
#!{python} -IS
import fcntl, os, termios, time
print("nexus-agent: begins")
print(os.environ["HELLO"], flush=True)
os.write(1, b"x" * 8 * 2**20)
while not os.path.exists(os.environ["BAD"]):
    time.sleep(0.0005)
    if not any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):         # the head has read what there was
        os.write(1, b"x")
"""


@pytest.fixture
def fake(world, tmp_path, monkeypatch):
    """A function of an ssh's text: (a world, the node behind it)."""
    environ = make_ssh(tmp_path)

    def make(text):
        (tmp_path / "bin" / "ssh").write_text(text.format(python=sys.executable))
        w = world(gpus=0)
        w.service.environ.update(environ, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
        monkeypatch.setenv("PATH", w.service.environ["PATH"])
        w.service.pool.waiting = [makers.job("abc", cwd=f"/{number}{'x' * 3000}") for number in range(100)]
        w.service.pool.add_node(nexus.NodeConfig("n1", "10.0.0.5"), "ann")
        nodes.append(w.service.pool.nodes["n1"])
        return w, nodes[0]

    nodes = []
    yield make
    (tmp_path / "bad").touch()                      # it ends
    for node in nodes:
        node.end()


def test_questions_that_a_node_does_not_read_do_not_fill_the_memory(fake):
    _, node = fake(FLOOD)
    live.until(lambda: node.line and node.line.outbox.unfinished_tasks > 20, lambda: node.error)
    assert node.line.outbox.qsize() <= 1 and node.error is None


def test_changes_wait_for_a_node_that_does_not_reply(away):
    w, file, _ = away
    write(file, b" " * 10)                          # no line's end: it does not reply any more
    size = w.node.line.outbox.unfinished_tasks
    for number in range(50):
        w.service.pool.waiting = [makers.job("abc", cwd=f"/{number}")]
        w.node.ask_anew()
    assert 0 < w.node.line.outbox.unfinished_tasks - size <= nexus.MAX_CHANGES and w.node.line.outbox.qsize() <= 1


def test_single_bytes_cost_little(fake):
    _, node = fake(DRIP)
    size = live.until(lambda: node.line and len(node.line.received) > 8 * 2**20 and len(node.line.received), "its bytes")
    began_s = time.process_time()
    live.until(lambda: len(node.line.received) > size + 300, "300 pieces")
    assert time.process_time() - began_s < 0.5


ELSEWHERE = """\
#!{python} -IS
import os, sys
with open(os.environ["REPLIES"], "a") as file:
    print(*sys.argv[1:-1], file=file)
sys.exit("git-receive-pack" in sys.argv[-1] or print(os.environ["PLACE"]))
"""
REFS = """\
#!{python} -IS
import os, sys
if "git-receive-pack" not in sys.argv[-1]:
    sys.exit(print("/snapshots"))
number, first = 0, b" refs/nexus/0" + bytes(1) + b"report-status"
while True:
    refs = [b"%040x" % at + (b" refs/nexus/%040x" % at if at else first) for at in range(number, number + 1000)]
    os.write(1, b"".join(b"%04x" % (len(ref) + 4) + ref for ref in refs))
    number += 1000
"""
PUSH = """\
#!{python} -IS
import os, sys
if "git-receive-pack" not in sys.argv[-1]:
    sys.exit(print("/snapshots"))
while True:
    os.write(2, b"x" * 65536)
"""


@pytest.fixture
def push(tmp_path, monkeypatch):
    """A function of an ssh's text: the error of a snapshot's push to the node behind it."""
    for name, text in make_ssh(tmp_path).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for words in ("init -q", "-c user.name=a -c user.email=a commit -q --allow-empty -m a"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    def make(text):
        (tmp_path / "bin" / "ssh").write_text(text.format(python=sys.executable))
        with pytest.raises(nexus.NexusError) as caught:
            nexus.push_snapshot(nexus.Ssh(nexus.NodeConfig("n1", "10.0.0.5"), os.environ), str(tmp_path), head, "r", os.environ)
        return caught.value.message

    return make


def test_what_git_says_of_a_node_is_bounded(push):
    assert "writes more than 1MB" in push(PUSH)


def test_git_hears_of_no_refs_without_end(push, monkeypatch):
    """It keeps them all in memory."""
    monkeypatch.setattr(nexus, "GIT_TIMEOUT_S", 30.0)
    assert "git push says" in push(REFS)


@pytest.mark.parametrize("place", ["/x@[10.6.6.6]/y", "/x@[10.6.6.6:66]/y", "/x%40%5b10.6.6.6%5d/y", "/x@[-oProxyCommand=id]/y", "/~eve/y"])
def test_a_node_sends_git_to_no_other_place(push, tmp_path, monkeypatch, place):
    """git would find a host, a port and a user in such a path."""
    monkeypatch.setenv("PLACE", place)
    push(ELSEWHERE)
    first, second = [line.split() for line in (tmp_path / "replies").read_text().splitlines()]
    assert first[-1] == second[-1] == "10.0.0.5" and "-p" not in second


def test_a_node_with_slots_without_end_gets_one_snapshot_at_a_time(away, monkeypatch):
    w, _, job_id = away
    at_once, most, done, threads = [], [], [], threading.active_count()

    def push(*_):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.01)                            # in which the others come, where they may
        at_once.pop()
        done.append(1)
        return "/r"

    monkeypatch.setattr(nexus, "push_snapshot", push)
    began = [nexus.with_facts(w.job(job_id), id=f"ab{letter}", snapshot=letter * 40, snapshot_repo="/r", cwd="/r")
             for letter in "cdefg" * 20]
    for job in began:
        w.node.start(job, {})
    assert threading.active_count() <= threads, "none for each"
    live.until(lambda: len(w.node.trees) == 5, "five commits")
    assert len(done) == 5 and max(most) == 1


def test_what_waits_for_another_snapshot_is_killed_at_once(bad, monkeypatch):
    w, _ = bad
    pushed, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(nexus, "push_snapshot", lambda *_: pushed.set() or (may_end.wait(live.PATIENCE_S) and "/r"))
    first, second = [w.add(node="n1", gpus=0, snapshot=letter * 40, snapshot_repo="/") for letter in "ab"]
    w.turn()
    assert pushed.wait(live.PATIENCE_S) and w.job(second).status == "running"
    w.service.admission.cancel(nexus.Choice([second], ("running",)), test_service.ANN)
    w.turn()
    assert w.job(second).status == "cancelled"
    may_end.set()
    live.until(lambda: w.turn() or w.job(first).current.pid == 77, lambda: w.api(first))
    assert list(w.node.trees) == ["a" * 40]


def test_orders_go_to_a_node_a_few_at_a_time(bad, monkeypatch):
    """It may claim to have slots without end, and read nothing."""
    w, _ = bad
    counts, ask = [], nexus.AgentLine.ask
    monkeypatch.setattr(nexus, "MAX_ORDERS", 2)
    monkeypatch.setattr(nexus.AgentLine, "ask", lambda line, question: counts.append(
        sum(one.order is not None for one in question["jobs"])) or ask(line, question))
    ids = [w.add(node="n1", gpus=0) for _ in range(4)]
    live.until(lambda: w.turn() or all(w.job(job_id).current.pid for job_id in ids), "their begin")
    assert max(counts) == 2
    w.node.end()
    order = nexus.Order(w.job(ids[0]), {})
    w.node.orders = {w.job(job_id).attempt_key: order for job_id in (*ids[1:], ids[0])}      # that of the first was made last
    assert [job.id for job, _ in w.node.list_due()] == ids[1:3], "those that were sent stay wanted"


def test_a_node_that_replies_at_once_leaves_time_to_the_service(away):
    w, file, _ = away
    w.service.tick_s = 0.2                          # what each of its replies costs
    replies = file.with_name("replies")
    size, began = replies.stat().st_size, time.monotonic()
    live.until(lambda: replies.stat().st_size >= size + 10, "ten replies")
    assert time.monotonic() - began >= 4 * 2 * 0.2          # some may answer questions of before


def test_a_node_is_told_of_no_directory_that_is_not_for_its_jobs(bad):
    w, _ = bad
    for node, cwd in (("n1", "/usr"), (w.service.node, "/etc"), (None, "/tmp")):
        w.add(node=node, cwd=cwd, begin="+1h")
    w.turn()
    live.until(lambda: w.node.latest.folders, "a question")
    assert w.node.latest.folders == ("/usr", "/tmp")


def test_a_node_that_goes_down_with_its_job_gets_none_for_a_while(away):
    w, file, job_id = away
    write(file, ended(cause="reboot", exit_code=None))
    live.until(lambda: w.turn() or w.job(job_id).status == "failed", lambda: w.api(job_id))
    next_id = w.add(node="n1", gpus=0)
    words = "n1: the machine went down while it ran"
    live.until(lambda: w.turn() or words in w.api(next_id)["waiting_for"], lambda: w.api(next_id))


def test_health_names_a_few_faults_of_many(away):
    w, file, _ = away
    write(file, gpus(*[{"index": number, "uuid": f"G{number}", "fault": "f" * 1000} for number in range(200)]))
    live.until(lambda: len(w.node.gpus) == 200, lambda: w.node.error)
    [reading] = [one["reading"] for one in w.service.health.check()["checks"] if one["name"] == "node n1"]
    assert reading.endswith("and 197 more") and len(reading) < 4000


# Mutations of a true reply, against a real service

HOSTILE = [None, True, "", "x" * 100000, "\x1b]0;x\x07\n", -1, 2**62, 2**64 - 1, 1e19, -1e19, 1e300, float("nan"), float("inf"), [],
           [[]] * 50, {}, {"command": "id", "status": "x", "id": "zzzz", "status_history": "abc"}, [1], "../../x", "$(id)",
           "-oProxyCommand=id", json.loads("[" * 60 + "]" * 60)]
TRUE = of_job(progress={"session": "77.nexus_job_abc", "notes": ["a note"], "processes_left": None, "files": None, "requeue": ""},
              samples={"peak_rss_mib": 5.0, "cpu_seconds": 1.0}, logs=["", ""])
TRUE["gpus"] = [{**GPU, "processes": [{"pid": 5, "memory_mib": 4.0, "user": "bob", "name": "python"}]}]


def mutate(rng):
    """A true reply with another value, one more key or one less somewhere."""
    path = rng.choice([path for path in makers.paths_of(TRUE) if path])
    *above, last = path
    holder = TRUE
    for key in above:
        holder = holder[key]
    how = rng.randrange(4)
    if how == 0:
        fewer = {key: one for key, one in holder.items() if key != last} if isinstance(holder, dict) else []
        return makers.put_at(TRUE, above, fewer)
    if how == 1 and isinstance(holder, dict):
        return makers.put_at(TRUE, above, {**holder, rng.choice(nexus.Job.NAMES): rng.choice(HOSTILE)})
    if how == 2 and isinstance(holder, list):
        return makers.put_at(TRUE, above, [*holder, *holder])
    return makers.put_at(TRUE, path, rng.choice(HOSTILE))


OWN = ("id", "command", "cwd", "user", "name", "gpus", "gpu_ids", "only_node", "retries", "created_at", "log_dir", "priority", "after")


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_node_says_its_head_goes_on(away, seed):
    """Its job there may end or begin anew, as any node may say; the job here, what was asked for, and all answers stay."""
    w, file, there = away
    rng, here = random.Random(seed), w.add(node=w.service.node)
    w.store.update(lambda state: [nexus.change_job(state.jobs[there], retries=1000)])
    live.until(lambda: w.turn() or w.job(here).status == "running", lambda: w.api(here))
    w.claim(here, 500)
    before, kept = [w.api(job) for job in (here, there)], {*os.listdir(w.folder), "bad", "state.json.prev", "journal.jsonl.prev"}
    for _ in range(20):
        reply, size = mutate(rng), file.with_name("replies").stat().st_size
        write(file, reply)
        live.until(lambda: w.turn(seconds=0.1) or file.with_name("replies").stat().st_size > size + 3, "replies")      # noqa: B023
        json.dumps([w.service.answers.describe_jobs(list(w.store.state.jobs.values())), w.service.pool.list_nodes()])
        for job, keys in zip(before, ((*OWN, "status", "attempt", "pid", "status_history", "notes"), OWN)):
            assert nexus.pick(w.api(job["id"]), keys) == nexus.pick(job, keys), reply
    assert kept.issuperset(os.listdir(w.folder)) and len(os.listdir(w.layout.log_dir)) == 2 and w.service.failure_count == 0, w.lines
    w.crash()
    assert w.api(there)["command"] == before[1]["command"] and not w.store.list_damaged()


def test_what_broke_out_does_not_any_more(tmp_path):
    """The replies of the report, literally, to a real service."""
    with live.Box(gpus=0, launcher="direct", cpu_slots=2, environ=make_ssh(tmp_path), is_starting=False) as box:
        os.symlink(tmp_path / "bin" / "ssh", box.bin / "ssh")
        box.start()
        assert box.nexus("node", "add", "n1").returncode == 0
        there = box.add("sleep 600", node="n1", gpus=0, retries=5)
        live.until(lambda: box.job(there)["pid"] == 77, lambda: box.job(there))
        before = box.job(there)
        for _, reply, words in BAD_JOBS[:8]:
            write(tmp_path / "bad", reply)
            live.until(lambda: any(words in note for note in box.job(there)["notes"]), lambda: box.job(there))      # noqa: B023
            assert [box.call("GET", path)[0] for path in ("/status", "/jobs", "/nodes")] == [200] * 3
            for key in ("command", "cwd", "only_node", "status", "status_history", "attempt", "pid", "finished_at", "exit_code"):
                assert box.job(there)[key] == before[key]
        shown = box.nexus("show", there).stdout
        assert "n1 answers what no nexus does of it" in shown and "nothing known since" in shown
        assert not os.path.exists("/tmp/PWNED") and "Internal error" not in box.log()
        assert box.nexus("stop").returncode == 0


def test_one_node_whose_news_cannot_be_taken_in_keeps_no_other_waiting(world, monkeypatch):
    monkeypatch.setattr(nexus.Node, "follow", lambda node: node.follower.end())
    w, seen = world(), []
    for name in ("n1", "n2"):
        w.service.pool.add_node(nexus.NodeConfig(name, "10.0.0.5"), "ann")
    monkeypatch.setattr(nexus.Node, "poll", lambda node, events: seen.append(node.name) or (1 / (node.name != "n1") and ()))
    w.turn()
    assert seen == ["n1", "n2"] and w.service.failure_count == 1

"""What a head takes of a node's reply, whatever that says."""

import base64
import threading

import far_end
import live
import pytest

import nexus

KEY = "abc-1-1"
QUESTION = nexus.Question(3, (nexus.Wanted(KEY, (0, 0), nexus.Limits()),), ("/",))


def read(reply, **question):
    """(the report, what is wrong with that of the job)."""
    asked = nexus.replace(QUESTION, **question)
    return nexus.read_report(far_end.fill(reply, asked.number, [KEY]), asked)


def test_a_sound_reply_is_taken_as_it_is():
    report, faults = read(far_end.of_job(log_sizes=[8, 0], logs=[far_end.LOG, ""]))
    assert (report.number, report.folders, faults) == (3, {"/": True}, {}) and [gpu.uuid for gpu in report.gpus] == ["G0"]
    [job] = report.jobs
    assert (job.key, job.progress.pid, job.log_sizes, job.logs) == (KEY, 77, (8, 0), (b"xxxxxxxx", b""))


@pytest.mark.parametrize("reason, reply, words", far_end.BAD_ENVELOPES, ids=[case[0] for case in far_end.BAD_ENVELOPES])
def test_a_bad_reply_is_refused(reason, reply, words):
    with pytest.raises((KeyError, TypeError, ValueError)) as caught:
        read(reply)
    assert words in nexus.describe_bad_node("n1", caught.value).message


@pytest.mark.parametrize("reason, reply, words", far_end.BAD_JOBS, ids=[case[0] for case in far_end.BAD_JOBS])
def test_a_bad_report_of_a_job_is_no_part_of_the_reply(reason, reply, words):
    report, faults = read(reply)
    assert report.jobs == () and list(faults) == [KEY] and words in faults[KEY]
    assert [gpu.uuid for gpu in report.gpus] == ["G0"], "the rest counts"


def test_what_is_said_twice_counts_once():
    reply, again = (far_end.of_job(progress={"processes_left": left}) for left in (3, 4))
    [job] = read({**reply, "jobs": [*reply["jobs"], *again["jobs"]]})[0].jobs
    assert job.progress.processes_left == 3


@pytest.mark.parametrize("reason, jobs", far_end.LATE, ids=[case[0] for case in far_end.LATE])
def test_a_late_reply_counts_for_what_it_tells(reason, jobs):
    """It may be older than the job, and know another that is over by now."""
    report, faults = read({**far_end.GOOD, "number": 2, "jobs": jobs})
    assert (report.number, report.jobs, faults) == (2, (), {})
    report, faults = read({**far_end.of_job(), "number": 2})
    assert [job.key for job in report.jobs] == [KEY] and not faults


def test_the_logs_of_all_jobs_share_a_reply():
    for count, most in ((0, nexus.LOG_BYTES), (1, nexus.LOG_BYTES // 2), (3, nexus.LOG_BYTES // 6)):
        assert nexus.replace(QUESTION, jobs=QUESTION.jobs * count).most_bytes == most
    many = [base64.b64encode(bytes(nexus.LOG_BYTES // 2 + 1)).decode()] * 2
    with pytest.raises(ValueError, match="bytes of logs at once"):
        read(far_end.of_job(log_sizes=[nexus.LOG_BYTES] * 2, logs=many))


def test_a_line_that_blocks_keeps_no_process_from_its_end():
    class Stream:
        def write(self, content):
            written.append(content)
            threads.append(threading.current_thread())

        def flush(self):
            pass

        def close(self):
            closed.set()

    written, threads, closed = [], [], threading.Event()
    outbox = nexus.start_writer(Stream(), "questions")
    for content in (b"a", b"b", b""):
        outbox.put(content)
    assert closed.wait(live.PATIENCE_S) and written == [b"a", b"b"] and threads[0].daemon

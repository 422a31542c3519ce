"""Whose a claim and a result are, whatever a job has put in their place."""

import os

import pytest

import nexus

DISK = nexus.Disk()

WHOSE = [  # reason, the key in a claim and a result, whether they count for the attempt aBc-1-1
    ("its own", "aBc-1-1", True), ("an older nexus wrote none", None, True), ("of a job whose id differs by case", "abc-2-1", False),
    ("of a former job of this id", "aBc-0-1", False), ("of another attempt", "aBc-1-2", False),
]


@pytest.mark.parametrize("reason, key, is_believed", WHOSE, ids=[case[0] for case in WHOSE])
def test_whose_a_claim_and_a_result_are(tmp_path, reason, key, is_believed):
    (tmp_path / "attempt-1").write_text(f"12 34 {key}\n56\n" if key else "12 34\n56\n")
    (tmp_path / "result-1.json").write_text('{"exit_code": 3, "runtime_seconds": 1.00%s}' % (f', "key": "{key}"' if key else ""))
    claim, result = nexus.read_claim(DISK, str(tmp_path), "aBc-1-1"), nexus.read_result(DISK, str(tmp_path), "aBc-1-1")
    assert claim == (nexus.Claim(12, 34, 56) if is_believed else None)
    assert (result.exit_code == 3) if is_believed else result is None


def make_fifo(path):
    os.mkfifo(path)


def write(content):
    return lambda path: path.write_bytes(content)


HOSTILE_FILES = [  # reason, what makes the file
    ("a FIFO", make_fifo), ("a folder", os.mkdir), ("endless", lambda path: path.symlink_to("/dev/zero")),
    ("a link to nothing", lambda path: path.symlink_to("gone")), ("a link to itself", lambda path: path.symlink_to(path)),
    ("huge", write(b" " * (nexus.JOB_FILE_BYTES + 1))), ("too deep", write(b"[" * 100000)), ("no text", write(b"\xff\xfe\x00")),
    ("a list", write(b"[]")), ("no number", write(b'{"exit_code": NaN, "runtime_seconds": 1}')), ("nothing", write(b"")),
    ("no exit code", write(b'{"exit_code": 18446744073709551615, "runtime_seconds": 1}')),
    ("a truth for an exit code", write(b'{"exit_code": true, "runtime_seconds": 1}')),
    ("it ran for ever", write(b'{"exit_code": 0, "runtime_seconds": 1e300}')),
    ("a cause of the head's", write(b'{"exit_code": 0, "runtime_seconds": 1, "cause": "killed"}')),
    ("a cause that is a list", write(b'{"exit_code": 0, "runtime_seconds": 1, "cause": ["launch"]}')),
    ("a pid of 19 digits", write(b"9999999999999999999 5\n5\n")), ("a pid that is none", write(b"0 5\n5\n")),
    ("ticks without end", write(b"5 9999999999999999999\n")),
]


@pytest.mark.parametrize("reason, make", HOSTILE_FILES, ids=[case[0] for case in HOSTILE_FILES])
def test_what_a_job_put_in_place_of_its_files_is_none_of_them(tmp_path, reason, make):
    for name in ("result-1.json", "attempt-1", "fault-2", "log.times"):
        make(tmp_path / name)
    assert nexus.read_result(DISK, str(tmp_path), "abc-1-1") is None
    assert not nexus.read_claim(DISK, str(tmp_path), "abc-1-1").pid, "nobody's whom we could end"
    (tmp_path / "result-2.json").write_text('{"exit_code": null, "runtime_seconds": 0.0, "cause": "launch"}')
    line = nexus.read_result(DISK, str(tmp_path), "abc-1-2").cause_line
    assert line is None or (len(line) <= nexus.MAX_WORDS and line.isprintable())
    assert nexus.read_log_times(DISK, str(tmp_path), (0, 0)) == []


def test_an_end_in_no_year_is_none(tmp_path):
    (tmp_path / "result-1.json").write_text('{"exit_code": 0, "runtime_seconds": 1.0}')
    os.utime(tmp_path / "result-1.json", (0, 300000000000))
    found = nexus.read_result(DISK, str(tmp_path), "abc-1-1")
    assert found is None or found.finished_at <= nexus.MAX_TIME, "a file system may take no such time"

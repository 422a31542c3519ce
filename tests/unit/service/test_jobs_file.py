"""Jobs from a file that others write."""

import os
import time

import pytest
from turns import ANN, fail

import nexus

# The jobs file


class File:
    """A jobs file of a service."""

    def __init__(self, world, tmp_path, **config):
        self.path = tmp_path / "jobs.csv"
        self.w = world(jobs_file=str(self.path), **config)

    def write(self, *lines, end="\n", is_whole=True):
        """Write it, and have it read; return what was wrong with it."""
        self.path.write_text("\n".join(lines) + end)
        self.w.service.jobs_file.load(is_whole)
        return self.w.service.jobs_file.faults

    @property
    def jobs(self):
        return list(self.w.store.state.jobs.values())

    def end(self, code):
        """Let what waits run and end so."""
        self.w.turn()
        for job in self.jobs:
            if job.status == "running":
                fail(self.w, job.id, 100 + job.number, code)


@pytest.fixture
def rows(world, tmp_path):
    return lambda **config: File(world, tmp_path, **config)


def test_each_content_becomes_a_job_once(rows):
    f = rows(gpus=1)
    f.write("1,a.py,,x")
    for lines in (["1,a.py,,x"], ["# new", "0,a.py,,x,0"], ["1,a.py,,x", "1,a.py,,x"]):
        f.write(*lines)
        assert len(f.jobs) == 1
    f.write("1,a.py,,x", "1,a.py,,y")
    assert len(f.jobs) == 2
    f.w.crash()
    f.w.service.jobs_file.load(True)
    assert len(f.jobs) == 2

AGAIN = [  # reason, exit code, what the file becomes, one after the other, how many jobs there are after each
    ("a failed one stays failed", 1, [["1,a.py"], ["# x", "1,a.py"]], [1, 1]),
    ("a failed one whose line is added again", 1, [["1,a.py", "1,a.py"]], [2]),
    ("a failed one whose line is taken out and put back", 1, [[], ["1,a.py"]], [1, 2]),
    ("a completed one whose line is added again", 0, [["1,a.py", "1,a.py"]], [1]),
    ("a completed one whose line is taken out and put back", 0, [["# none"], ["1,a.py"]], [1, 1]),
]


@pytest.mark.parametrize("reason, code, files, counts", AGAIN, ids=[case[0] for case in AGAIN])
def test_a_line_that_is_added_again(rows, reason, code, files, counts):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(code)
    made = []
    for lines in files:
        f.write(*lines)
        made.append(len(f.jobs))
    assert made == counts


@pytest.mark.parametrize("left, is_whole", [("", True), ("1,a.py\n", False)], ids=["nothing is written yet", "not all of it"])
def test_a_jobs_file_that_is_written_anew_has_lost_no_line(rows, left, is_whole):
    f = rows(gpus=1)
    f.write("1,a.py", "1,b.py")
    f.end(1)
    f.end(1)
    f.path.write_text(left)
    f.w.service.jobs_file.load(is_whole)
    f.write("1,a.py", "1,b.py")
    assert len(f.jobs) == 2

BAD_ROWS = [  # reason, configuration, the line, what is said of it
    ("no such GPU", {}, "1,bad.py,,x,7", "of index 7"), ("no priority", {}, "urgent,bad.py", "priority"),
    ("not allowed", {"allowed_script_paths": ["/jobs"]}, "1,bad.py", "not below /jobs"),
]


@pytest.mark.parametrize("reason, config, line, says", BAD_ROWS, ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_told_once_and_the_others_load(rows, reason, config, line, says):
    f = rows(**config)
    for _ in range(2):
        fault, = f.write("1,/jobs/a.py", line, "1,/jobs/b.py")
        assert fault.startswith("line 2, ") and "bad.py" in fault and says in fault
        assert [job.command.split("/")[-1] for job in f.jobs] == ["a.py", "b.py"]
    assert len([one for one in f.w.lines if says in one]) == 1
    assert any(says in hint for hint in f.w.service.status.describe()["hints"])
    assert f.write("1,/jobs/a.py", "1,/jobs/b.py") == []


def test_a_last_line_without_a_newline_is_half_written_while_the_file_changes(rows):
    f = rows()
    assert f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.", end="", is_whole=False) == [] and len(f.jobs) == 1
    assert f.write("1,a.py,,--lr 0.1", "1,b.py,,--lr 0.25", end="") == []
    assert [job.command.split()[-1] for job in f.jobs] == ["0.1", "0.25"]


def test_rows_wait_for_room_in_the_queue(rows):
    f = rows(gpus=1, queue_limit=2)
    f.w.service.editor.set_paused(True, "ann")
    faults = f.write(*(f"1,{name}.py" for name in "abcd"))
    assert len(f.jobs) == 2
    assert [fault.partition(" is full")[0] for fault in faults] == ["line 3, 'c.py': the queue", "line 4, 'd.py': the queue"]
    f.w.service.cancellation.cancel(nexus.Choice([f.jobs[0].id], ("pending",)), ANN)
    assert len(f.write(*(f"1,{name}.py" for name in "abcd"))) == 1
    assert [job.command.split()[-1] for job in f.jobs if job.status == "pending"] == ["b.py", "c.py"]


def test_a_jobs_file_that_is_not_there_is_told_and_takes_nothing_back(rows):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(1)
    f.path.unlink()
    f.w.service.jobs_file.load(True)
    assert "there is no file" in f.w.service.jobs_file.faults[0] and not f.w.service.health.check()["is_healthy"]
    f.write("1,a.py")
    assert len(f.jobs) == 1 and f.w.service.jobs_file.faults == []


def endless(path):
    path.symlink_to("/dev/zero")


def huge(path):
    with open(path, "wb") as file:
        file.truncate(10 * 2**30)


def unreadable(path):
    path.symlink_to("/proc/self/mem")       # may be opened, and not be read


@pytest.mark.parametrize("make, says", [(os.mkdir, "no regular file"), (os.mkfifo, "no regular file"), (endless, "no regular file"),
                                        (huge, "is longer than 16MB"), (unreadable, "Input/output error")])
def test_a_jobs_file_that_cannot_be_read_is_told_and_takes_nothing_back(rows, make, says):
    f = rows(gpus=1)
    f.write("1,a.py")
    f.end(1)
    f.path.unlink()
    make(f.path)
    f.w.service.jobs_file.load(True)
    check, = [one for one in f.w.service.health.check()["checks"] if one["name"] == "jobs file"]
    assert not check["is_ok"] and says in check["reading"] and str(f.path) in check["reading"]
    assert any(says in hint for hint in f.w.service.status.describe()["hints"])
    f.path.rmdir() if f.path.is_dir() else f.path.unlink()
    f.write("1,a.py")
    assert len(f.jobs) == 1 and f.w.service.health.check()["is_healthy"]


def test_a_jobs_file_that_hangs_is_told(rows):
    f = rows()
    f.write("1,a.py")

    def load(_):
        f.w.clock.sleep(40)
        check, = [one for one in f.w.service.health.check()["checks"] if one["name"] == "jobs file"]
        assert not check["is_ok"] and "has not answered for 40s" in check["reading"]

    f.w.service.jobs_file.load = load
    f.w.service.jobs_file.watch()
    assert [one["is_ok"] for one in f.w.service.health.check()["checks"] if one["name"] == "jobs file"] == [True]


def test_a_wrong_file_of_many_lines_as_jobs_file(rows):
    """A log, for example: what is wrong with each line is known, and the next reading costs no more than this one."""
    f = rows()
    lines = [f"{number}" for number in range(20000)]
    assert len(f.write(*lines)) == 20000
    begin = time.process_time()
    f.write(*lines)
    assert time.process_time() - begin < 2 and len(f.w.lines) < 60


def test_the_jobs_file_is_whole_when_it_has_not_changed_for_an_interval(rows):
    f = rows(jobs_file_interval_seconds=30)
    f.path.write_text("1,a.py")
    counts = []
    for _ in range(2):
        assert f.w.service.jobs_file.watch() == 30
        counts.append(len(f.jobs))
    assert counts == [0, 1]

CUDA = [  # reason, cuda_arg, arguments, what runs, whether its GPUs are narrowed
    ("replaced where it stands", "replace", "--cuda 9 -v", "--cuda 1 -v", False), ("a row without", "replace", "-v", "-v", True),
    ("added to every row", "add", "-v", "-v --cuda 1", False), ("added: it stands there", "add", "--cuda 9 -v", "--cuda 1 -v", False),
]


@pytest.mark.parametrize("reason, cuda_arg, arguments, ran, is_narrowed", CUDA, ids=[case[0] for case in CUDA])
def test_cuda_arg_of_rows(rows, reason, cuda_arg, arguments, ran, is_narrowed):
    f = rows(gpus=2, cuda_arg=cuda_arg)
    f.write(f"1,a.py,,{arguments},1")
    f.w.turn()
    script = (f.w.folder_of(f.jobs[0].id) / "job.sh").read_text()
    assert f"a.py {ran}'" in script and ("CUDA_VISIBLE_DEVICES=1" in script) == is_narrowed


def begin(w, job_id):
    w.slurm.set("1", "RUNNING")

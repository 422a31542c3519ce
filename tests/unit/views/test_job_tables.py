"""Lists of jobs, and nexus top."""

import re

import pytest
from makers import GB, NOW, finished, foreign, gpu, job, mig_slice, running
from shown import PLAIN, TERMINAL, listed, status

import nexus


def test_the_queue_to_a_file_is_one_line_a_job():
    waiting = listed(job("abc", name="lr 1"), job("abd", gpus=0, priority=0), waiting_for="GPU 0 is paused",
                     estimated_start="2024-10-24T15:40:15Z")
    made = nexus.format_queue(waiting + listed(job("abe", gpus=0.5, priority=2)), PLAIN)
    assert made == """\
ID   PRIORITY  GPUS  ADDED        STARTS       NAME  COMMAND          WAITING FOR
abc  normal    1     10-24 15:29  10-24 15:40  lr 1  python train.py  GPU 0 is paused
abd  high      0     10-24 15:29  10-24 15:40  -     python train.py  GPU 0 is paused
abe  low       0.5   10-24 15:29  -            -     python train.py
"""


def test_the_queue_on_a_terminal_gives_the_reason_a_line_of_its_own_once():
    made = nexus.format_queue(listed(job("abc"), job("abd"), waiting_for="GPU 0 is paused"), TERMINAL)
    assert [line.split()[0] for line in made.splitlines() if "GPU 0 is paused" not in line] == ["ID", "abc", "abd"]
    assert [number for number, line in enumerate(made.splitlines()) if "GPU 0 is paused" in line] == [2]


def test_two_columns_may_have_one_heading():
    columns = [nexus.Column("A", cell=lambda row: row[0]), nexus.Column("A", cell=lambda row: row[1]), nexus.Column("B", cell=str)]
    assert nexus.format_table(columns, [("x", "yy")], PLAIN) == "A  A   B\nx  yy  ('x', 'yy')\n"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lists_fit_the_screen(width):
    many = listed(job("abc", command="python train.py " + "x" * 500 + "\n"), job("abd", command="python 训练.py " + "数" * 500),
                  waiting_for="GPU 0 runs job " + "y" * 500)
    for line in (nexus.format_queue(many, nexus.Paint("", width)) + nexus.format_jobs(many, nexus.Paint("", width))).splitlines():
        assert nexus.count_columns(line) <= width


# nexus top


def group_of(name, position=0, hold=None, **counts):
    return {"name": name, "position": position, "hold": hold,
            **{each: counts.get(each, 0) for each in ("pending", "running", "completed", "failed", "cancelled")}}


def test_top_names_the_types_of_gpus_where_there_are_several():
    shown = nexus.list_top(status(gpus=[mig_slice(0), mig_slice(1, 20), gpu(1)]), [], 0, [], [], PLAIN)
    assert [line.split()[:3] for line, _ in shown[3:] if line] == [
        ["GPU", "TYPE", "UTIL"], ["0.0", "1g.10gb", "-"], ["0.1", "2g.20gb", "-"], ["1", "RTX", "3090"]]
    assert "TYPE" not in str(nexus.list_top(status(gpus=[gpu(0), gpu(1)]), [], 0, [], [], PLAIN))


def test_top_of_eight_gpus_fits_a_small_terminal():
    """Each GPU has a row with its job; who else uses one is named; what waits stands below, a group in one row."""
    busy = {"utilization": 98.0, "memory_used_mib": 20 * GB, "temperature": 70.0, "power_watts": 300.0}
    gpus = [*(gpu(index, **busy) for index in range(4)), gpu(4, processes=(foreign(),)), gpu(5, is_paused=True),
            gpu(6, fault="GPU is lost"), gpu(7)]
    made = status([running("abc", (0, 1, 2), command="torchrun train.py --lr 1e-3 " + "x" * 100, started_at=NOW - 8100),
                   running("abd", (3,), number=2, stop_cause="killed"), running("abe", (), number=3, name="load"),
                   *(job(f"qq{letter}", number) for number, letter in enumerate("abcdefgh", 4))], gpus)
    waiting = listed(job("qqa", gpus=2), job("qqb"), waiting_for="no GPU is free", position=1)
    waiting_groups = [group_of("old", completed=3), group_of("sweep", pending=4, running=1, failed=2, hold="paused by ann")]
    shown = nexus.list_top(made, waiting, 2, waiting_groups, listed(finished("zzz", number=9)), TERMINAL)
    text = "\n".join(line for line, _ in shown)
    assert all(nexus.count_columns(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 23, text
    host, _, _, *rows = text.splitlines()
    assert host == "gpu1  CPU 12%, memory 40.2 of 128GB" and "old" not in text
    assert "\n".join(rows) == """\
GPU  UTIL  MEMORY     TEMP  POWER  JOB  RUNTIME  COMMAND
0    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
1    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
2    98%   20GB/24GB  70C   300W   abc  2h 15m   torchrun train.py…xxxxxxxxxxxxx
3    98%   20GB/24GB  70C   300W   abd  1m       (stopping: killed)
4    0%    0GB/24GB   -     -      -    -        in use by bob…python, 16GB)
5    0%    0GB/24GB   -     -      -    -        paused
6    0%    0GB/24GB   -     -      -    -        unusable (GPU is lost)
7    0%    0GB/24GB   -     -      -    -        available
-    -     -          -     -      abe  1m       load: python train.py

WAITING  GPUS  STARTS  COMMAND
group    -     -       sweep: 1 running, 2 failed, 4 pending; paused by ann
qqa      2     -       python train.py
     no GPU is free
qqb      1     -       python train.py
… 2 more jobs

FINISHED  RESULT  RUNTIME  COMMAND
zzz       exit 0  1m       python train.py"""
    assert [job_id for _, job_id in shown if job_id] == ["abc", "abc", "abc", "abd", "abe", "qqa", "qqb", "zzz"]


def test_lists_tell_the_machine_where_there_are_several():
    here, there, waits = job("abd", only_node="", number=2), job("abe", only_node="n1", number=3), job("abc")
    made = [nexus.job_json(one, NOW, where) for one, where in ((waits, None), (here, "gpu1"), (there, "n1"))]
    assert nexus.format_queue(made, PLAIN) == """\
ID   NODE  GPUS  ADDED        COMMAND          WAITING FOR
abc  any   1     10-24 15:29  python train.py
abd  gpu1  1     10-24 15:29  python train.py
abe  n1    1     10-24 15:29  python train.py
"""
    ran = [nexus.job_json(finished("abf", node="n1"), NOW, "n1"),
           nexus.job_json(finished("abg", status="failed", exit_code=3, cause="exit"), NOW, "gpu1"),
           {**nexus.job_json(running("abh", (1,), node="n1"), NOW, "n1"), "unknown_since": "2024-10-24T14:02:00Z"}]
    assert nexus.format_jobs([made[0], *ran], PLAIN) == """\
ID   STATUS     NODE  GPU  RESULT   RUNTIME  STARTED      FINISHED     COMMAND
abc  pending    -     -    -        -        -            -            python train.py
abf  completed  n1    0    exit 0   1m       10-24 15:29  10-24 15:30  python train.py
abg  failed     gpu1  0    exit 3   1m       10-24 15:29  10-24 15:30  python train.py
abh  running    n1    1    unknown  1m       10-24 15:29  -            python train.py
"""
    assert "FINISHED" not in nexus.format_jobs([ran[2]], PLAIN)
    ran[1]["cause_line"] = "KeyError: 'lr'"
    heading, *rows = nexus.format_jobs(ran, PLAIN).splitlines()
    assert heading.endswith("  MESSAGE") and [row.partition("train.py")[2].strip() for row in rows] == ["", "KeyError: 'lr'", ""]


# Sweeps, and what is cut

SWEEP = [{"lr": rate, "bs": size} for rate in ("1e-3", "1e-4") for size in ("32", "64", "128", "256")]
TRAIN = "python train.py --data /scratch/imagenet --lr {lr} --bs {bs} --epochs 90 --out runs/x"
LAST_LINE = "epoch 9/9 val_loss: 0.25 - acc: 0.875 on the validation set"
WIDTHS = [60, 80, 100, 132]


def sweep_of(make, prefix, **facts):
    return [make(f"{prefix}{letter}", number=number, group="exp1", name=f"lr={values['lr']} bs={values['bs']}",
                 sweep_values=tuple(values.items()), command=nexus.fill_placeholders(TRAIN, values), **facts)
            for number, (letter, values) in enumerate(zip("cdefghjk", SWEEP), 1)]


def finished_with(one, line):
    return nexus.replace(one, attempts=(nexus.replace(one.current, last_line=line),))


def eight_busy_gpus():
    """A status of eight GPUs with a job of the sweep on each."""
    busy = {"utilization": 98.0, "memory_used_mib": 20 * GB, "temperature": 70.0, "power_watts": 300.0}
    jobs = [nexus.replace(one, attempts=(nexus.replace(one.current, gpu_indices=(index,), gpu_uuids=(gpu(index).uuid,)),))
            for index, one in enumerate(sweep_of(running, "ab"))]
    made = status(jobs, [gpu(index, **busy) for index in range(8)])
    for row in made["running_jobs"]:
        row.update(fraction=0.21, estimated_end="2024-10-24T15:33:42Z")
    return made


def all_tables(width):
    """{what prints it: its lines} at a terminal."""
    paint, made = nexus.Paint("", width, 24), eight_busy_gpus()
    waits = listed(*sweep_of(job, "qq"), waiting_for="no GPU is free: 8 of 8 are in use", position=1,
                   estimated_start="2024-10-24T15:40:15Z")
    ended = [{**row, "outcome": "dependency", "status": "cancelled"} for row in listed(*sweep_of(finished, "zz"))]
    others = listed(job("www", command="python other.py --x y"), waiting_for="no GPU is free: 8 of 8 are in use", position=9)
    crowd = [group_of("exp2", pending=40, running=2, completed=3, failed=1, cancelled=3, hold="paused by ann"),
             group_of("exp3", pending=4)]
    best = nexus.make_results("exp1", [finished_with(one, LAST_LINE) for one in sweep_of(finished, "yy")], {})
    return {
        "results": nexus.format_results(best, paint).splitlines(),
        "top": [line for line, _ in nexus.list_top(made, waits[:2] + others, 2, crowd, ended[:5], paint)],
        "nexus": nexus.format_fitting_snapshot(made, paint).splitlines(),
        "jobs": nexus.format_jobs([*ended, *made["running_jobs"], *waits], paint).splitlines(),
        "running": nexus.format_jobs(made["running_jobs"], paint).splitlines(), "queue": nexus.format_queue(waits, paint).splitlines()}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_cut_in_its_middle(width):
    """Beside what is cut stand whole words of what was there, and each line fits."""
    words = {*f"{LAST_LINE} {TRAIN}".format(lr="1e-3", bs="32").split(), *(text for values in SWEEP for text in values.values())}
    for what, lines in all_tables(width).items():
        assert [line for line in lines if nexus.count_columns(line) > width] == [], what
        for line in lines:
            for before, after in re.findall(r"(\S*)…(\S*)", line):
                assert (before in words and after in words) or line.startswith("… "), f"{what}: {line}"


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_sweep_begin_with_what_differs_whole(width):
    for what, lines in all_tables(width).items():
        for values in SWEEP[:2] if what == "top" else SWEEP if what != "results" else ():       # its values are columns
            told = [line for line in lines if re.search(rf"\blr={values['lr']} bs={values['bs']}(:|\s|$)", line)]
            assert told, f"{what}: {values}"
    assert "lr=1e-3 bs=32" in nexus.format_jobs(listed(*sweep_of(job, "qq")), PLAIN), "the name, in a pipe"


def test_a_reason_stands_once_in_top():
    lines = all_tables(80)["top"]
    assert sum("no GPU is free" in line for line in lines) == 1
    assert any("49 jobs: 2 running, 3 completed, 1 failed, 3 cancelled" in line for line in lines)


FITS = [  # reason, GPUs with jobs, window's height, whether each has a row
    ("the jobs fit", 3, 24, False), ("they do not", 8, 24, True), ("a high window", 8, 60, False), ("a pipe", 8, 0, False)]


@pytest.mark.parametrize("reason, count, height, is_table", FITS)
def test_the_snapshot_fits_the_window(reason, count, height, is_table):
    made = eight_busy_gpus()
    made = {**made, "gpu_status": made["gpu_status"][:count], "running_jobs": made["running_jobs"][:count]}
    paint = nexus.Paint("", 80 if height else 0, height)
    text = nexus.format_fitting_snapshot(made, paint)
    assert ("GPU  UTIL" in text) == is_table == ("Job ID: " not in text), reason
    if is_table:
        assert text.startswith("Queue: 0 jobs pending [RUNNING]\n") and len(text.splitlines()) < height
        assert all(row["id"] in text for row in made["running_jobs"])
    else:
        assert text == nexus.format_snapshot(made, paint)


def test_a_small_window_shows_the_nodes_that_get_no_jobs():
    bad = {"name": "n1", "trouble": "cannot reach n1", "hint": "ssh n1", "unknown_since": None, "is_leaving": False}
    text = nexus.format_fitting_snapshot({**eight_busy_gpus(), "nodes": [{"name": ""}, bad]}, nexus.Paint("", 80, 24))
    assert "n1: cannot reach n1\n  ssh n1\n" in text

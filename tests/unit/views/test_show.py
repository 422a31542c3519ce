"""All of a job in words."""

import pytest
from makers import NOW, finished, job, running
from shown import FAILED, PLAIN

import nexus

SHOWN = [  # reason, job, line of `nexus show`
    ("its outcome", finished("abc", exit_code=3, status="failed", cause="exit"), "Job abc: failed (exit 3)"),
    ("exit code 0 is a fact", finished("abc"), "  exit code: 0"),
    ("so is GPU 0", running("abc", (0,)), "  where: GPU 0 of here"),
    ("and no GPU at all", running("abc", ()), "  GPUs: 0"),
    ("and the highest priority, by its name", job("abc", priority=0), "  priority: high"),
    ("any other priority by its number", job("abc", priority=7), "  priority: 7"),
    ("times of the reader's clock", finished("abc"), "  ended: 2024-10-24 15:30:15"),
    ("its runtime", finished("abc"), "  runtime: 1m"),
    ("harmless", job("abc", command="a\x1b[2J\nb"), "  command: a [2J b"),
    ("several GPUs", running("abc", (0, 1)), "  where: GPU 0, 1 of here"),
    ("a time limit", job("abc", timeout_seconds=5400), "  time limit: 1h 30m"),
    ("what it asked of a GPU", job("abc", gpu_mem_mib=10240), "  GPU memory: 10GB free on each"),
    ("a flag", job("abc", tty=True), "  terminal: yes"),
    ("what it used", finished("abc", peak_rss_mib=13.8), "  peak memory 14MB"),
    ("of its GPUs", finished("abc", peak_gpu_mem_mib=20480.0), "  GPU memory up to 20GB"),
    ("and how much", finished("abc", mean_gpu_util=49.6), "  GPUs 50% busy on average"),
    ("what ended it", finished("abc", status="failed", signal=9, cause="signal", exit_code=137), "  signal: SIGKILL"),
    ("its attempts before", job("abc", attempts=(FAILED,)), "  attempt 1: exit 3 on GPU 0, 1 of n2, 2024-10-24 15:29:15, 1m (no data)"),
    ("and the present one", running("abc", attempts=(FAILED,)), "  attempt 2: running on GPU 0, 2024-10-24 15:29:15, 1m"),
    ("and the last one", finished("abc", attempts=(FAILED,)), "  attempt 2: exit 0 on GPU 0, 2024-10-24 15:29:15, 1m"),
    ("when it is tried again", job("abc", retry_at=NOW + 5), "  next attempt: 2024-10-24 15:30:20"),
    ("a share", job("abc", gpus=1.5), "  GPUs: 1.5"), ("those before it", job("abc", after=("abd", "abe")), "  after: abd, abe"),
    ("what it went through", job("abc", status_history=(("pending", NOW),)), "  history: pending 15:30:15"),
]


def chained(depth, one):
    return {**nexus.job_json(one, NOW, "here"), "depth": depth}


def test_the_chain_of_a_job():
    rows = [chained(0, finished("abc", name="prep", status="failed", cause="exit", exit_code=1, retried_as="abh")),
            chained(1, finished("abd", name="train", status="cancelled", cause="dependency", after=("abc",))),
            chained(2, job("abe", name="x" * 50, after=("abd", "abc"), after_group=("g",)))]
    assert nexus.format_chain(rows, "abd", PLAIN) == [
        "Chain", "  abc prep: failed (exit 1), again as abh", ">   abd train: cancelled (dependency)",
        f"      abe {nexus.format_line('x' * 50, 40)}: pending, after abd, abc, after group g"]
    assert nexus.format_chain(rows[:1], "abc", PLAIN) == [], "a job alone has none"
    assert "\n> " in nexus.format_job(rows[1], PLAIN, chain=rows)
    many = [chained(0, job(f"j{number}", name="n")) for number in range(100)]
    for at, before, after in ((0, "", "  … 80 more after them"), (50, "  … 45 before them", "  … 35 more after them"),
                              (99, "  … 80 before them", "")):
        lines = nexus.format_chain(many, f"j{at}", PLAIN)
        assert (lines[1] if before else "", lines[-1] if after else "") == (before, after) and f"> j{at} n: pending" in lines


@pytest.mark.parametrize("reason, one, line", SHOWN, ids=[case[0] for case in SHOWN])
def test_format_job(reason, one, line):
    assert line in nexus.format_job(nexus.job_json(one, NOW, "here"), PLAIN).splitlines(), reason


def test_show_groups_what_it_says():
    text = nexus.format_job(nexus.job_json(finished("abc", peak_rss_mib=2048.0), NOW, "here"), PLAIN, ["epoch 1", "epoch 2"])
    assert [line for line in text.splitlines() if not line.startswith("  ")] == [
        "Job abc: completed (exit 0)", "Asked for", "Where and when", "How it ended", "What it used", "Last lines"]
    assert text.endswith("What it used\n  peak memory 2GB\nLast lines\n  epoch 1\n  epoch 2\n")


def test_why_tells_the_decision_gpu_by_gpu():
    told = {"id": "abc", "status": "pending", "why": "GPU 0 runs job xyz", "facts": ["it is first in the queue"],
            "gpus": [{"node": "here", "place": "0", "index": 0, "verdict": "runs job xyz"},
                     {"node": "here", "place": "1", "index": 1, "verdict": None}]}
    assert nexus.format_why(told, PLAIN) == """\
Job abc waits: GPU 0 runs job xyz
  it is first in the queue
  GPU 0: runs job xyz
  GPU 1: it could have this one
"""
    ended = {**told, "status": "failed", "why": "ValueError: \x1b[2Jx", "facts": [], "gpus": []}
    assert nexus.format_why(ended, PLAIN) == "Job abc is failed: ValueError:  [2Jx\n"


def test_each_field_of_the_form_has_a_label_in_words():
    rows = nexus.form_rows()
    assert [name for name, row in nexus.ASKED.items() if row.label and name not in {shown["name"] for shown in rows}] == []
    assert {row.unit for row in nexus.ASKED.values()} | {unit for lines in nexus.SHOW_LINES.values() for _, unit in lines.values()} == (
        nexus.UNIT_TEXTS.keys())
    labels = [row["label"] for row in rows]
    assert len({*labels}) == len(labels) and not [label for label in labels if "_" in label or not label[0].isupper()]

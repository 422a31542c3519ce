"""The table of the results of a group."""

import csv
import io

import pytest
from makers import finished, job, running

import nexus


def test_a_sweep_of_many_names_is_no_table_of_all_of_them():
    jobs = [job(f"{letter}aa", group="wide", sweep_values=(("lr", "0.1"), *((f"v{letter}{number}", "1") for number in range(99))))
            for letter in "bcde"]
    made = nexus.make_results("wide", jobs, {})
    assert len([column for column in made["columns"] if column["kind"] == "sweep"]) == nexus.MAX_SWEEP_COLUMNS
    assert made["columns"][0]["key"] == "id" and "sweep.lr" in [column["key"] for column in made["columns"]]


CELLS = [("=1+1", "'=1+1"), (" =1", "' =1"), ("\t=1", "' =1"), ("\uff1d1", "'\uff1d1"), ("-1", "-1"), ("-1e-3", "-1e-3"), ("+1-1", "'+1-1"),
         ("@a", "'@a"), ("x;=1", '"x;=1"'), ("a,b", '"a,b"'), ('say "a"', '"say ""a"""'), (None, ""), (0.5, "0.5")]


@pytest.mark.parametrize("cell, wanted", CELLS, ids=[repr(cell) for cell, _ in CELLS])
def test_a_spreadsheet_takes_no_cell_for_a_formula(cell, wanted):
    assert nexus.format_csv_cell(cell) == wanted


def swept(job_id, lr, seed, line, command="t --lr {lr} --seed {seed}", **facts):
    values = (("lr", lr), ("seed", seed))
    return finished(job_id, command=command.format(lr=lr, seed=seed), sweep_values=values, metric_line=line, last_line="Done.", **facts)


def fold(jobs, live=None, **how):
    """The table of means, and its rows as {title: cell}."""
    made = nexus.make_results("g", jobs, live or {}, **how)
    return made, [dict(zip([column["title"] for column in made["columns"]], row["cells"])) for row in made["rows"]]


SEEDS = [swept("aaa", "1", "0", "loss=0.5 acc=0.5", runtime_seconds=10.0, peak_gpu_mem_mib=10.0),
         swept("aab", "1", "1", "loss=0.7", runtime_seconds=20.0, peak_gpu_mem_mib=30.0),
         swept("aac", "10", "1", "loss=0.1"), swept("aad", "10", "10", "loss=0.3"), swept("aae", "10", "2", None, status="failed"),
         swept("aba", "1", "0", "loss=9", command="base --lr {lr} --seed {seed}")]


def test_seeds_are_folded_into_their_mean():
    made, rows = fold(SEEDS, mean=True)
    assert made["over"] == "seed" and [row["ids"] for row in made["rows"]] == [["aac", "aad"], ["aaa", "aab"], ["aba"], ["aae"]]
    assert [column["title"] for column in made["columns"]] == [
        "Job", "lr", "loss", "acc", "Status", "Runtime", "GPU memory", "Jobs"]
    assert [(row["lr"], row["loss"], row["Jobs"], row["Status"]) for row in rows] == [
        ("10", 0.2, 2, "completed"), ("1", 0.6, 2, "completed"), ("1", 9, 1, "completed"), ("10", None, 1, "failed")]
    assert [row["deviations"] and row["deviations"][2] for row in made["rows"]] == [0.1414, 0.1414, None, None]
    assert (rows[1]["acc"], rows[1]["Runtime"], rows[1]["GPU memory"]) == (0.5, 15, 30.0), "of one number no deviation"
    assert (made["best_id"], made["total"]) == ("aac", 4)
    by_lr = fold(SEEDS, over="lr")[0]
    assert [row["ids"] for row in by_lr["rows"] if len(row["ids"]) > 1] == [["aab", "aac"]]
    assert [row["loss"] for row in fold(SEEDS, mean=True, order="-loss")[1]] == [9, 0.6, 0.2, None]


def test_a_mean_as_text_and_as_a_spreadsheet():
    made, _ = fold(SEEDS, mean=True)
    lines = nexus.format_results(made, nexus.Paint(False, 80)).splitlines()
    assert max(map(len, lines)) <= 80 and lines[1].split()[:7] == ["aac", "+1", "10", "0.20", "±", "0.14", "-"], lines
    head, first, *_ = csv.reader(io.StringIO(nexus.format_results_csv(made)))
    assert head == ["id", "lr", "loss", "loss sd", "acc", "acc sd", "status", "runtime_seconds", "peak_gpu_mem_mib", "jobs"]
    assert first[:5] == ["aac aad", "10", "0.2", "0.1414", ""]


def test_the_commit_is_in_the_spreadsheet_and_not_in_the_table():
    made, rows = fold([swept("aaa", "1", "0", "loss=1", commit="a" * 40), swept("aab", "2", "0", None, snapshot="b" * 40)])
    assert [row["Commit"] for row in rows] == ["a" * 40, "b" * 40]
    table = list(csv.DictReader(io.StringIO(nexus.format_results_csv(made))))
    assert [row["commit"] for row in table] == ["a" * 40, "b" * 40]
    assert "a" * 20 not in nexus.format_results(made, nexus.Paint(False, 0))
    mixed = [swept(f"aa{seed}", "1", str(seed), None, commit="ab"[seed > 0] * 40) for seed in range(3)]
    assert [row["Commit"] for row in fold(mixed[1:], mean=True)[1]] == ["b" * 40]
    assert "Commit" not in fold(mixed, mean=True)[1][0], "which of them would it be?"


MEANS = [(0.123456, 0.0123, "0.123 ± 0.012"), (91.2, 1.5, "91.2 ± 1.5"), (1234.5, 200, "1234 ± 200"), (0.5, 0, "0.5 ± 0"),
         (1, 1e-20, "1.000000000000 ± 0.000000000000")]


@pytest.mark.parametrize("mean, deviation, text", MEANS)
def test_a_mean_has_the_digits_of_its_deviation(mean, deviation, text):
    assert nexus.format_mean(mean, deviation) == text


NO_NUMBERS = [("nan", ["loss=nan", "loss=0.5"], "nan"), ("infinite", ["loss=inf", "loss=0.5"], "inf"),
              ("missing", ["Done.", "loss=0.5"], 0.5)]


@pytest.mark.parametrize("reason, lines, mean", NO_NUMBERS, ids=[row[0] for row in NO_NUMBERS])
def test_what_is_no_number_is_in_the_mean(reason, lines, mean):
    made, rows = fold([swept(f"aa{number}", "1", str(number), line) for number, line in enumerate(lines)], mean=True)
    assert rows[0]["loss"] == mean and made["rows"][0]["deviations"][2] is None


WHICH = [  # reason, the values of the sweep, the option, the value that is folded; or what is said
    ("seed", ("lr", "seed"), None, "seed"), ("another spelling", ("lr", "rng_Seed"), None, "rng_Seed"), ("named", ("lr", "s"), "s", "s"),
    ("no seed", ("lr", "s"), None, "has a value seed"), ("two", ("seed_a", "seed_b"), None, "has a value seed"),
    ("unknown", ("lr",), "x", "has a value x"),
    ("no sweep", (), None, "has a value seed")]


@pytest.mark.parametrize("reason, names, over, found", WHICH, ids=[row[0] for row in WHICH])
def test_what_means_are_over(reason, names, over, found):
    jobs = [job("aaa", sweep_values=tuple((name, "1") for name in names))]
    if " " not in found:
        assert nexus.make_results("g", jobs, {}, mean=True, over=over)["over"] == found
        return
    with pytest.raises(nexus.NexusError, match=found) as raised:
        nexus.make_results("g", jobs, {}, mean=True, over=over)
    assert raised.value.kind == "usage" and raised.value.hint


SAME = [  # a command, its value, another command, its value; whether that is all in which they differ
    ("t 1 1", "1", "t 1 10", "10", True), ("t 10 1", "1", "t 10 10", "10", True), ("t1.py 1", "1", "t1.py 2", "2", True),
    ("t 1", "1", "u 2", "2", False), ("t 1", "1", "t 3", "2", False), ("t", "1", "t", "2", True),
    ("out/s1/m1", "1", "out/s2/m2", "2", True),
    ("t ", "", "t 2", "2", False), ("1" * 5000, "1", "2" * 5000, "2", False), ("t a a", "a", "t aa aa", "aa", True)]


@pytest.mark.parametrize("first, value, second, other, is_same", SAME, ids=[row[0][:20] + ">" + row[2][:20] for row in SAME])
def test_commands_that_differ_in_a_value_alone(first, value, second, other, is_same):
    assert nexus.is_same_but(first, second, value, other) == is_same


def test_the_last_line_with_numbers_counts_of_running_jobs_too():
    jobs = [swept("aaa", "1", "0", "loss=0.5"), running("aab", sweep_values=(("lr", "2"), ("seed", "0"))),
            finished("aac", last_line="loss=0.25", sweep_values=(("lr", "3"), ("seed", "0")))]
    _, rows = fold(jobs, {"aab": {"metric_line": "50%|##| 1/2 [loss=0.75]", "last_line": "tick"}})
    assert [(row["Job"], row["loss"], row["Last line"]) for row in rows] == [
        ("aac", 0.25, "loss=0.25"), ("aaa", 0.5, "Done."), ("aab", 0.75, "tick")], "what an older nexus ran has its last line alone"

"""The table of the results of a group."""

import pytest
from makers import job

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

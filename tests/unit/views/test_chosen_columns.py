"""Columns that are chosen by name: which there are, how people read them, and how a spreadsheet does."""

import csv
import io

import pytest
from makers import NOW, finished, job

import nexus

NAMES = [  # what is typed, the keys; or what is told
    ("id,status", ["id", "status"]), ("ID, Runtime", ["id", "runtime_seconds"]),
    ("result,gpu,starts", ["outcome", "gpu_places", "estimated_start"]),
    ("waiting for", ["waiting_for"]), ("message", ["cause_line"]), ("id,id", ["id"]), ("peak-gpu-mem-mib", ["peak_gpu_mem_mib"]),
    ("id,comand", "did you mean 'command'?"), ("x9", "nexus jobs --json"), ("", "no column ''"), ("id,", "no column ''"),
]


@pytest.mark.parametrize("text, names", NAMES)
def test_columns_have_the_names_of_keys_and_of_headings(text, names):
    if isinstance(names, list):
        assert nexus.parse_columns(nexus.JOB, text) == names
        return
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_columns(nexus.JOB, text)
    assert names in f"{caught.value.message} {caught.value.hint}" and caught.value.kind == "usage"


def test_each_heading_is_a_key():
    assert {*nexus.HEADINGS.values(), *nexus.JOB_CSV, *nexus.QUEUE_CSV} <= nexus.JOB.keys()
    headings = {column.heading.lower().replace(" ", "_") for column in (*nexus.JOB_COLUMNS, *nexus.QUEUE_COLUMNS)}
    assert {word for word in headings if word not in nexus.JOB and word not in nexus.HEADINGS} == set()


def rows():
    jobs = [finished("abc", name="=1+1", command='echo "a,b"', gpus=1.5, created_at=NOW), job("abd", priority=0, is_held=True)]
    return [nexus.job_json(each, NOW, "box") for each in jobs]


CELLS = [  # the column, what stands for the two jobs
    ("id", ["abc", "abd"]), ("name", ["=1+1", "-"]), ("runtime", ["1m", "-"]), ("priority", ["normal", "high"]), ("is_held", ["no", "yes"]),
    ("gpus", ["1.5", "1"]), ("outcome", ["exit 0", "-"]), ("cause", ["-", "-"]),
]
SHOWN = {"runtime": "RUNTIME", "outcome": "RESULT", "is_held": "IS HELD"}         # where the heading is not the key


def test_a_table_of_chosen_columns_is_for_people():
    for name, cells in CELLS:
        [key] = nexus.parse_columns(nexus.JOB, name)
        assert nexus.format_columns(nexus.JOB, [key], rows(), nexus.Paint("")).split("\n")[:3] == [SHOWN.get(name, name.upper()), *cells]
    wide = nexus.format_columns(nexus.JOB, ["id", "command", "created_at"], rows(), nexus.Paint("", 60, 20))
    assert all(len(line) <= 60 for line in wide.split("\n"))


def test_csv_is_for_programs():
    text = nexus.format_csv(nexus.JOB_CSV, rows())
    head, first, second = csv.reader(io.StringIO(text))
    assert head == list(nexus.JOB_CSV)
    made = dict(zip(head, first))
    assert (made["name"], made["command"], made["gpus"]) == ("'=1+1", 'echo "a,b"', "1.5"), "no spreadsheet takes it for a formula"
    assert made["created_at"] == nexus.format_time(NOW) and dict(zip(head, second))["finished_at"] == ""
    assert nexus.format_csv(["attempts", "gpu_places"], [{"attempts": [{"a": 1}], "gpu_places": ["0", "n1:1"]}]) == (
        'attempts,gpu_places\n"[{""a"": 1}]","0,n1:1"\n')
    assert nexus.format_csv(["id"], []) == "id\n"


def test_a_reason_is_told_in_words():
    reason = {"code": "quota", "subject": "g", "detail": "group g is at its limit"}
    assert nexus.format_fact("reason", nexus.JOB["reason"], reason) == "group g is at its limit"

"""The jobs file and files of commands, and what a command says of models and GPUs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import texts

import nexus

COMMAND_FILES = [  # reason, text, [(line, command)]
    ("one a line", "a\nb\n", [(1, "a"), (2, "b")]),
    ("empty lines and comments", "# first\n\na\n   \n  # b\nc # d\n", [(3, "a"), (6, "c # d")]),
    ("written on Windows", "\ufeffa\r\nb\r\n", [(1, "a"), (2, "b")]), ("joined there", "a \\\r\n  b\r\nc\r\n", [(1, "a   b"), (3, "c")]),
    ("a line is a line to the shell: other separators of Unicode are text", "echo 'a\u2028b\x85c\x0cd'\n",
     [(1, "echo 'a\u2028b\x85c\x0cd'")]),
    ("joined", "a \\\n  --b \\\n> log\nc\n", [(1, "a   --b > log"), (4, "c")]), ("in a word, too", "ab\\\ncd", [(1, "abcd")]),
    ("to an empty line", "a \\\n\nb", [(1, "a"), (3, "b")]), ("nothing follows", "a\\\n", [(1, "a")]), ("nor here", "a \\", [(1, "a")]),
    ("a backslash that is text", "a \\\\\nb", [(1, "a \\\\"), (2, "b")]),
    ("in a comment it joins nothing", "# a \\\nb \\\nd", [(2, "b d")]),
    ("in quotes", 'a "b \\\n # c" "d\\"" \\\ne', [(1, 'a "b  # c" "d\\"" e')]),
    ("blanks behind it", "a \\ \nb", [(1, "a \\"), (2, "b")]),
]


@pytest.mark.parametrize("reason, text, commands", COMMAND_FILES, ids=[case[0] for case in COMMAND_FILES])
def test_parse_commands(reason, text, commands):
    assert nexus.parse_commands(text) == commands, reason


# What a command says of models and GPUs

CUDAS = [  # reason, command, the same on GPUs 2 and 5
    ("it is added where there is none", "python a.py", "python a.py --cuda 2,5"),
    ("replaced", "python a.py --cuda 0 --x", "python a.py --cuda 2,5 --x"),
    ("with an equals sign", "python a.py --cuda=0,1 --x", "python a.py --cuda 2,5 --x"),
    ("a variable", "python a.py --cuda $GPUS --x", "python a.py --cuda 2,5 --x"),
    ("-1, for the CPU", "python a.py --cuda -1 --x", "python a.py --cuda 2,5 --x"),
    ("without a value", "python a.py --cuda --x", "python a.py --cuda 2,5 --x"),
    ("the next command is not its value", "python a.py --cuda; ls", "python a.py --cuda 2,5; ls"),
    ("nor a file it writes to", "python a.py --cuda >log 2>&1", "python a.py --cuda 2,5 >log 2>&1"),
    ("a pipe", "python a.py --cuda 0|tee log", "python a.py --cuda 2,5|tee log"),
    ("nor the next line", "python a.py --cuda\npython b.py", "python a.py --cuda 2,5\npython b.py"),
    ("the quotes around it stay", 'bash -c "python a.py --cuda 0"', 'bash -c "python a.py --cuda 2,5"'),
    ("and those around an empty one", "bash -c 'python a.py --cuda'", "bash -c 'python a.py --cuda 2,5'"),
    ("brackets stay", "(python a.py --cuda 0)", "(python a.py --cuda 2,5)"),
    ("another option", "a --cuda-graphs 1 --no--cuda 3", "a --cuda-graphs 1 --no--cuda 3 --cuda 2,5"),
]


@pytest.mark.parametrize("reason, command, filled", CUDAS, ids=[case[0] for case in CUDAS])
def test_fill_cuda_option(reason, command, filled):
    assert nexus.fill_cuda_option(command, (2, 5)) == filled, reason
    assert bool(re.search(nexus.CUDA_OPTION, command)) is (filled != command + " --cuda 2,5" or command.endswith("--cuda"))
    assert nexus.fill_cuda_option(filled, (2, 5)) == filled, "a second time changes nothing"


# The jobs file

Row = nexus.JobsRow
JOBS_FILES = [  # reason, text, rows
    ("empty lines and comments", "\n \n # x\n0,a.py\n", [Row(4, 0, "a.py", None, "", None)]),
    ("written on Windows", "\ufeff0,a.py,,,\r\n1,b.py,,,\r\n", [Row(1, 0, "a.py", None, "", None), Row(2, 1, "b.py", None, "", None)]),
    ("its last line is still being written", "0,a.py,env,--x,\n0,b.py,en", [Row(1, 0, "a.py", "env", "--x", None)]),
    ("a line without its last fields", "0,a.py\n1,b.py,env\n", [Row(1, 0, "a.py", None, "", None), Row(2, 1, "b.py", "env", "", None)]),
    ("blanks around the fields", " 0 , a.py , env , --x  1 , 0 \n", [Row(1, 0, "a.py", "env", "--x  1", (0,))]),
    ("ranges and commas", "0,a.py,,,0-2,5\n", [Row(1, 0, "a.py", None, "", (0, 1, 2, 5))]),
    ("arguments that hold commas", '0,a.py,,"--sizes 1,2,3",0\n', [Row(1, 0, "a.py", None, "--sizes 1,2,3", (0,))]),
    ("and quotes", '0,a.py,,"--name ""a b"", --y",\n', [Row(1, 0, "a.py", None, '--name "a b", --y', None)]),
    ("priorities by name, and below zero", "high,a.py\n-1,b.py\n", [Row(1, 0, "a.py", None, "", None), Row(2, -1, "b.py", None, "", None)]),
]


@pytest.mark.parametrize("reason, text, rows", JOBS_FILES, ids=[case[0] for case in JOBS_FILES])
def test_parse_jobs_file(reason, text, rows):
    assert nexus.parse_jobs_file(text) == (rows, []), reason


BAD_ROWS = [  # reason, line, what is said of it
    ("one word", "hello", "priority,script,conda_env,arguments,allowed_gpus"), ("no script", "0,,env,--x,", "priority,script"),
    ("a heading without #", "priority,script,conda_env,arguments,allowed_gpus", "priority must be"),
    ("a priority that is none", "urgent,a.py,,,", '"urgent"'), ("a GPU that is none", "0,a.py,,,x", "'x' is not a list of GPU indices"),
    ("commas in the arguments, without quotes", "0,a.py,,--sizes 1,2,x,", "in double quotes"),
    ("quotes that do not end", '0,a.py,,"--x,0', "quotes do not match"),
    ("text behind the quotes", '0,a.py,,"--x" --y,0', "quotes do not match"),
    ("an option for conda", "0,a.py,--help,,", "conda must be"), ("control characters", "0,a.py,,\x1b[2J,", "characters that no command"),
    ("NUL", "0,a.py,,a\0b,", ""), ("a line end of old", "0,a.py,,--x\r--y,", ""), ("as long as no line is", f"0,a.py,,{'x' * 200000},", ""),
]


@pytest.mark.parametrize("reason, line, part", BAD_ROWS, ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_told_and_the_others_load(reason, line, part):
    rows, faults = nexus.parse_jobs_file(f"0,first.py\n{line}\n1,last.py\n")
    assert [(row.line, row.script) for row in rows] == [(1, "first.py"), (3, "last.py")], reason
    assert len(faults) == 1 and faults[0].startswith("line 2, '") and part in faults[0]
    assert nexus.format_line(line, 100)[:40] in faults[0] and len(faults[0]) < 400 and not re.search(nexus.CONTROL, faults[0])


CONTENTS = [  # reason, two lines, whether they are the same job
    ("priority and GPUs do not count", "0,a.py,env,--x,0-3\n", "2,a.py,env,--x,5\n", True),
    ("nor do quotes", "0,a.py,env,--x,\n", '0,a.py,env,"--x",\n', True), ("the script does", "0,a.py\n", "0,b.py\n", False),
    ("the environment does", "0,a.py,env\n", "0,a.py\n", False), ("the arguments do", "0,a.py,,--x\n", "0,a.py,,--y\n", False),
    ("fields do not run into each other", "0,a.py,b,c\n", "0,a.py,,bc\n", False),
]


@pytest.mark.parametrize("reason, one, other, expected", CONTENTS, ids=[case[0] for case in CONTENTS])
def test_what_tells_rows_apart(reason, one, other, expected):
    (first,), (second,) = nexus.parse_jobs_file(one)[0], nexus.parse_jobs_file(other)[0]
    assert (first.content == second.content) is expected, reason


row_cells = st.sampled_from(["0", "high", "x", "a.py", "", "env", '"', '"a,b"', "0-3", "#", "\ufeff", "\r", "\0", "²", "-x", " "]) | texts
jobs_texts = st.lists(st.lists(row_cells, max_size=7).map(",".join), max_size=5).map("\n".join)


@given(jobs_texts, st.data())
def test_every_line_of_a_jobs_file_is_a_row_or_a_fault_or_nothing(text, data):
    rows, faults = nexus.parse_jobs_file(text)
    lines = text.lstrip("\ufeff").split("\n")[:-1]
    told = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(rows) + len(faults) == len(told) and all("\n" not in fault for fault in faults)
    cut = text[: data.draw(st.integers(0, len(text)))]
    assert nexus.parse_jobs_file(cut)[0] == [row for row in rows if row.line <= cut.lstrip("\ufeff").count("\n")], (
        "what is half written changes nothing")

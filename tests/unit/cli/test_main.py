"""main(argv, environ, out, err) -> exit code: help, and words that are wrong."""

import re
import shlex

import pytest
from console import Stream, call_main

import nexus

LISTED = [
    "status", "top", "add", "run", "queue", "history", "jobs", "show", "why", "wait", "logs", "kill", "cancel", "remove", "retry",
    "edit", "dismiss", "clear", "move", "attach", "screens", "pause", "resume", "start", "stop", "restart", "serve", "metrics", "usage",
    "results", "open", "health", "token", "node", "config", "install", "help"]


def main(*argv, **environ):
    done = call_main(*argv, **environ)
    return done.code, done.out, done.err


# Words


def test_help():
    """A screen for every day, and all the rest behind `more`."""
    for words in (["help"], ["--help"], ["-h"]):
        code, out, err = main(*words)
        daily = re.findall(r"^  ([a-z]+) ", out, re.MULTILINE)
        assert (code, err) == (0, "") and daily == [name for name in LISTED if name in nexus.DAILY]
    assert len(out.splitlines()) <= 23, "the prompt has the last line"
    code, more, err = main("help", "more")
    assert (code, err) == (0, "") and sorted([*daily, *re.findall(r"^  ([a-z]+)  ", more, re.MULTILINE)]) == sorted(LISTED)
    assert all(len(line) <= 80 for line in (out + more).splitlines())
    assert {word for word in nexus.ALIASES if f"{word} = " not in " ".join(more.split())} == set() and "--detailed" in more


@pytest.mark.parametrize("command", LISTED)
def test_help_of_each_command(command):
    answers = [main(*words) for words in (["help", command], ["--help", command], [command, "--help"], [command, "-h"])]
    if command != "help":
        assert answers[0][0] == 0 and answers[0][1].startswith(f"usage: nexus {command}") and answers[0][2] == ""
    assert answers[0] == answers[1]


def test_help_of_a_command_of_two_words():
    answer = main("help", "node", "add")
    assert answer == main("node", "add", "--help") and answer[1].startswith("usage: nexus node add")


def test_help_goes_to_where_data_goes(capsys):
    code, out, err = main("add", "--help")
    assert code == 0 and out.startswith("usage: nexus add") and err == "" and capsys.readouterr() == ("", "")


def test_version():
    for flag in ("--version", "-V"):
        code, out, err = main(flag)
        assert (code, err) == (0, "") and re.fullmatch(rf"nexus {re.escape(nexus.__version__)} \([0-9a-f]{{8}}\)\n", out)

WRONG = [  # words, what it says
    (["stats"], "did you mean 'status'?"), (["quue"], "did you mean 'queue'?"), (["xyzzy"], "nexus help more list them"),
    (["help", "ad"], "did you mean 'add'?"), (["status", "--wacth"], "--wacth"), (["--wacth"], "--wacth"), (["show"], "ID"),
    (["jobs", "--status", "done"], "done"), (["logs", "abc", "--stream", "x"], "stderr"),
    (["move", "abc"], "--first"), (["config", "delete"], "sample"), (["start", "--log-level", "LOUD"], "WARNING"), (["status", "x"], "x"),
    (["\x1b[31mred"], "[31mred"), ([""], "''"), (["caf\udce9"], "not a command"),
    (["wait"], "--group"), (["retry"], "--failed"), (["kill", "abc", "--group", "g"], "--group"),
    (["pause", "0", "--group", "g"], "not both"),
    (["why"], "ID"), (["retry", "--failed", "a"], "not both"), (["clear", "a", "--all"], "not both"),
    (["dismiss"], "nexus dismiss --all"), (["dismiss", "a", "--all"], "not both"),
    *(([command, *words, "--name", ""], "--name needs a value") for command, *words in (
        ["cancel"], ["kill"], ["remove"], ["wait"], ["pause"], ["resume"], ["edit", "--gpus", "1"], ["move", "--last"], ["retry"],
        ["clear"])),
    *(([command, *words], "ids or names") for command, *words in (
        ["cancel"], ["remove"], ["edit", "--gpus", "1"], ["move", "--last"], ["clear"], ["show"], ["attach"])),
    (["edit", "a", "--name", "x", "--set-name", "y"], "mean the same"), (["pause", "--dry-run"], "the queue"),
    (["metrics", "x"], "x"), (["queue", "--group"], "--group"),
    (["kill", "--gruop", "g"], "did you mean '--group'?"), (["edit", "a", "--retry", "b"], "hint: did you mean '--retries'?"),
    (["add", "--gpu=1", "x"], "did you mean '--gpus'?"),
    (["add", "--cpus", "4", "x"], "hint: nexus help add"),
    (["add", "--mem", "4G", "x"], "hint: leave it out; of a GPU's memory: --gpu-mem 4G\n"),
    (["sbatch", "-p", "gpu", "--qos=x", "--foo", "x"],
     "does not know '-p', '--qos' and '--foo'\nhint: -p, --qos: leave it out; --foo: nexus help add\n"),
    (["sbatch", "--foo", "--bar=3", "--mem", "10G", "--time", "5", "x"],
     "'--foo', '--bar' and '--mem'\nhint: --foo, --bar: nexus help add; --mem: leave it out; of a GPU's memory: --gpu-mem 10G\n"),
    (["add", "--exclusive", "--qos", "x"], "does not know '--exclusive' and '--qos'\nhint: leave it out\n"),
    (["sbatch", "--mail-type=END", "--constraint", "a", "x"], "hint: --mail-type: leave it out; a mail for each job: on_finish"),
    (["add", "-p", "gpu", "x"], "hint: leave it out\n"),
    *((["add", *words], f"hint: --priority {words[1]}\n") for words in (["-p", "high", "x"], ["-p", "0", "x"], ["-p", "Low", "x"])),
    (["edit", "abc", "-p", "low"], "hint: --priority low\n"), (["run", "-p", "high", "x"], "hint: --priority high\n"),
    (["status", "-w"], "hint: nexus top shows it as it changes; nexus wait ID waits"), (["-w", "abc"], "hint: nexus wait abc\n"),
    (["-u", "ann"], "nexus jobs --user ann"), (["-t"], "hint: nexus logs -f\n"), (["-k", "abc"], "hint: nexus kill abc\n"),
    (["kill"], "hint: nexus kill ID, or nexus kill --status running, --group NAME or --name PATTERN (these two take pending jobs too)"),
    (["kill", "--all"], "nexus kill --status running"), (["wait"], "nexus wait --status running"), (["cancel"], "--status pending"),
    (["kill", "-15", "abc"], "hint: leave it out: TERM"), (["kill", "-INT", "abc"], "hint: --signal INT\n"),
    (["wait", "abc", "--timeout", "2h"], "hint: timeout 2h nexus wait ID\n"), (["logs", "--lines", "3"], "hint: -n 3\n"),
    (["add", "--begin", "tomorow 7:00", "x"], '"tomorrow 7:00"'), (["add", "--begin", "soon", "x"], '"+2h" or "tomorrow 7:00"'),
    *(([command, "--since", "soon"], "--since 1d") for command in ("jobs", "history", "usage")),
    (["cancel", "--since", "soon"], '"yesterday"'), (["jobs", "--since", "2999-01-01"], "is in the future"),
]


@pytest.mark.parametrize("words, says", WRONG, ids=[" ".join(case[0]).encode("ascii", "backslashreplace").decode() for case in WRONG])
def test_wrong_words_are_usage_errors(words, says):
    code, out, err = main(*words)
    assert (code, out) == (2, "") and says in err and err.startswith("nexus: ") and "\nhint: " in err and err.endswith("\n"), err
    assert "\x1b" not in err and "Traceback" not in err          # before any service was asked: none can be started in /dev/null


@pytest.mark.parametrize("words, command", [(["ls"], "jobs"), (["ps"], "jobs"), (["rm", "abc"], "remove"), (["submit", "true"], "add")])
def test_words_of_other_queues_are_understood(words, command):
    found = nexus.find_command(words, nexus.COMMANDS)
    assert found.name == command and nexus.parse_words(found, words[1:], Stream()).chosen

EXAMPLES = [(command, example) for command in nexus.COMMANDS for example in command.examples]


@pytest.mark.parametrize("command, example", EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_examples_of_the_help_can_be_typed(command, example):
    words = shlex.split(example.partition(" && ")[0])
    assert words[0] == command.name and nexus.parse_words(command, words[1:], Stream()).chosen
    assert f"  nexus {example}\n" in main("help", command.name)[1]


def test_a_fault_of_ours_shows_its_traceback_and_is_1(monkeypatch):
    monkeypatch.setattr(nexus, "COMMANDS", (nexus.Subcommand("status", "x", lambda call: 1 / 0),))
    code, out, err = main()
    assert (code, out) == (1, "") and err.startswith("nexus: this is a fault of nexus itself") and "ZeroDivisionError" in err


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(call):
        raise KeyboardInterrupt
    monkeypatch.setattr(nexus, "COMMANDS", (nexus.Subcommand("status", "x", interrupt),))
    assert main() == (130, "", "")

BEFORE = {"PATH": "/v/bin:/usr/bin", "VIRTUAL_ENV": "/v", "HOME": "/h"}

CACHE = "/h/.cache/uv/environments-v2/nexus-9593a2f949122575"

UV = {"UV": "/usr/bin/uv", "UV_RUN_RECURSION_DEPTH": "1"}

WRAPPED = [  # what uv 0.13.9, uv by pipx 1.18.4 and a shell do: reason, sys.prefix, the parent, what is added, whether it is dropped
    ("uv run nexus.py", CACHE, "/usr/bin/uv", {**UV, "PATH": f"{CACHE}/bin:/v/bin:/usr/bin", "VIRTUAL_ENV": CACHE}, True),
    ("uvx", "/c/archive-v0/rdMlQ1H", "/opt/uv", {"UV": "/opt/uv", "PATH": "/c/archive-v0/rdMlQ1H/bin:/v/bin:/usr/bin"}, True),
    ("uv run --with", "/c/builds-v0/.tmpjxaJci", "/usr/bin/uv", {
        **UV, "VIRTUAL_ENV": "/c/builds-v0/.tmpjxaJci", "PATH": "/c/builds-v0/.tmpjxaJci/bin:/c/archive-v0/Pr/bin:/v/bin:/usr/bin"}, True),
    ("a later cache", "/c/environments-v12/n", "/usr/bin/uv", {**UV, "PATH": "/c/environments-v12/n/bin:/v/bin:/usr/bin"}, True),
    ("an activated venv, in which nexus is", "/v", "/usr/bin/bash", {}, False),
    ("uv run python nexus.py, in an activated venv", "/v", "/usr/bin/uv", {**UV, "PATH": "/v/bin:/v/bin:/usr/bin"}, False),
    ("uv run python nexus.py, in a project", "/p/.venv", "/usr/bin/uv", {
        **UV, "PATH": "/p/.venv/bin:/v/bin:/usr/bin", "VIRTUAL_ENV": "/p/.venv"}, False),
    ("a script of the user's that uv runs, and that calls nexus.py", CACHE, "/usr/bin/python3.11", {
        **UV, "PATH": f"{CACHE}/bin:/v/bin:/usr/bin", "VIRTUAL_ENV": CACHE}, False),
    ("uv run nexus, as it is installed by a uv", CACHE, "/usr/bin/uv", {**UV, "PATH": "/p/.venv/bin:/usr/bin"}, False),
    ("pipx run, by pip", "/h/.cache/pipx/31e61817e45e44f", "/usr/bin/bash", {"PIP_USER": "0"}, False),
]


@pytest.mark.parametrize("reason, prefix, parent, added, is_dropped", WRAPPED, ids=[case[0] for case in WRAPPED])
def test_what_a_wrapper_made_for_nexus_is_dropped(reason, prefix, parent, added, is_dropped):
    given = {**BEFORE, **added}
    assert nexus.leave_wrapper(given, prefix, parent, BEFORE) == (BEFORE if is_dropped else given)
    assert nexus.leave_wrapper(given, prefix, parent, {}) == given, "where nothing is known of before"


def test_the_tool_of_uv_is_known_by_its_receipt(tmp_path):
    given = {**BEFORE, "PATH": f"{tmp_path}/bin:/v/bin:/usr/bin", "UV": "/usr/bin/uv"}
    assert nexus.leave_wrapper(given, str(tmp_path), "/usr/bin/uv", BEFORE) == given
    (tmp_path / "uv-receipt.toml").write_text("[tool]\n")
    assert nexus.leave_wrapper(given, str(tmp_path), "/usr/bin/uv", BEFORE) == BEFORE

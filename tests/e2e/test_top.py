"""nexus top at a terminal: what is shown, and what its keys do."""

import fcntl
import re
import signal
import struct
import termios

import pytest
from console import Home


@pytest.fixture
def home():
    """A running job, two that wait, one that has completed; and a terminal in which top shows them."""
    with Home(cpu_slots=1, kill_grace_seconds=1) as made:
        client = made.client()
        made.ended = client.add("echo hello", gpus=0, name="ended")
        client.wait([made.ended])
        made.running = client.add("echo hello; sleep 600", gpus=0, name="running")
        made.wait_for_start(made.running)
        made.first, made.second = (client.add("sleep 600", gpus=0, name=name) for name in ("first", "second"))
        with made.terminal("top", NO_COLOR="1", columns=80, rows=24) as made.top:
            wait_for_choice(made, made.running)
            yield made


def wait_for_choice(home, job_id):
    home.top.wait_for(rb"> [^\r\n]*\b" + job_id.encode() + rb"\b")


def press(home, keys, *patterns):
    home.top.shown = b""
    home.top.type(keys)
    for pattern in patterns:
        home.top.wait_for(pattern)


UP, DOWN = "\x1b[A", "\x1b[B"


def test_what_the_keys_do_with_a_job(home):
    press(home, DOWN)
    wait_for_choice(home, home.first)
    press(home, "p", f"job {home.first} is held")
    assert home.job(home.first)["is_held"]
    press(home, "p", f"job {home.first} is released")
    question = f"cancel job {home.first} (first: sleep 600)? y or n"
    press(home, "xy", question)                             # pasted: it answers nothing
    press(home, "n", "q ends")
    press(home, "x", question)
    assert home.job(home.first)["status"] == "pending"
    press(home, "y", f"job {home.first} is cancelled")
    assert home.job(home.first)["status"] == "cancelled"
    wait_for_choice(home, home.first)                       # where it has gone
    press(home, "r")
    again = home.top.wait_for(rb"job (\w+) runs again as (\w+)")
    assert again[1].decode() == home.first and home.job(again[2].decode())["status"] == "pending"
    press(home, "x", f"job {home.first} is cancelled: there is nothing to stop")
    press(home, UP * 9)
    wait_for_choice(home, home.running)
    press(home, "x", f"stop job {home.running} (running: echo hello; sleep 600)? y or n")
    press(home, "y", f"job {home.running} is being stopped")
    home.wait_for(home.running, "cancelled")
    home.top.type("q")
    assert home.top.end()[0] == 0


def test_a_job_and_its_log_are_shown(home):
    press(home, "\r", f"Job {home.running}: running", "  command: echo hello; sleep 600", "that is all; q goes back")
    press(home, "q")
    wait_for_choice(home, home.running)
    for back in ("q", "\x03"):
        press(home, "l", f"-n 100 {home.running}; q goes back", "hello")
        press(home, back)
        wait_for_choice(home, home.running)
    press(home, DOWN * 3)
    wait_for_choice(home, home.ended)
    press(home, "l", "hello", "that is all; q goes back")
    press(home, "q")
    wait_for_choice(home, home.ended)
    press(home, UP * 9)
    wait_for_choice(home, home.running)
    press(home, "?", "follows its log", "that is all; q goes back")
    press(home, "q")
    wait_for_choice(home, home.running)
    home.top.type("\x03")
    assert home.top.end()[0] == 0


def test_it_leaves_the_terminal_as_it_was(home):
    before = termios.tcgetattr(home.top.side)
    home.top.process.send_signal(signal.SIGTERM)
    code, shown = home.top.end()
    assert code == 143 and shown.endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")
    after = termios.tcgetattr(home.top.side)
    assert after[3] & termios.ICANON and after[3] & termios.ECHO and not before[3] & termios.ICANON
    with home.terminal("top") as terminal:
        terminal.wait_for("q ends")
        terminal.type("\x1a\x1c")                           # Ctrl-Z, Ctrl-\\
        terminal.type("?")
        terminal.wait_for("that is all; q goes back")
        terminal.type("q")
        terminal.wait_for("q ends")
        terminal.type("q")
        assert terminal.end()[0] == 0 and termios.tcgetattr(terminal.side)[3] & termios.ICANON


def test_a_filter(home):
    press(home, "/secondd\x7f", "/second")
    wait_for_choice = home.top.wait_for(rb"  no job runs[^>]*> ([^ ]*)[^>]*/second")
    assert wait_for_choice[1].decode() == home.second
    press(home, "\n", "q ends  /second")
    press(home, "/\x1b", rb"running[\s\S]*first[\s\S]*second[\s\S]*ended[\s\S]*q ends(?! */)")


def test_the_choice_stays_with_its_job(home):
    press(home, DOWN * 2)
    wait_for_choice(home, home.second)
    home.main("move", home.second, "--first")
    home.top.wait_for(home.second + " ")
    wait_for_choice(home, home.second)
    home.main("stop")
    press(home, "x", "does not run")
    home.main("start")
    home.top.wait_for("Queue: ")
    wait_for_choice(home, home.second)
    press(home, "p", f"job {home.second} is held")
    fcntl.ioctl(home.top.side, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    press(home, DOWN * 9)
    wait_for_choice(home, home.ended)
    home.top.shown = b""
    shown = home.top.wait_for(rb"\x1b\[H([^\x1b]|\x1b\[2K)*q ends")[0]
    assert shown.count(b"\n") == 9 and b"> " + home.ended.encode() in shown
    home.main("clear", "--all")
    wait_for_choice(home, home.first)                       # the last one


def test_the_choice_stays_with_a_job_that_leaves_its_list(home):
    """Behind the last that is shown, into a group's row, and among the ended ones."""
    press(home, DOWN * 2)
    wait_for_choice(home, home.second)
    home.client().add_all(["sleep 600"] * 30, gpus=0, priority=0)
    row = rb"> " + home.second.encode() + rb" [^\r]*\r\n\x1b\[2K"
    home.top.wait_for(row + rb"\d\d:[^\r]* more line")      # the window ends with it
    home.main("edit", home.second, "--group", "g")
    home.top.wait_for(rb"  group [^\r]*\r\n\x1b\[2K" + row)
    home.main("cancel", home.second)
    ids = home.client().add_all(["sleep 600"] * 6, gpus=0)
    for job_id in ids:
        home.main("cancel", job_id)
    home.top.wait_for(rb"FINISHED[^>]*  " + ids[-1].encode() + rb" [^>]*> " + home.second.encode())


SIZES = [  # what the terminal and the environment tell, the size then
    (0, 0, {}, 80, 24), (0, 0, {"COLUMNS": "120", "LINES": "12"}, 120, 12), (0, 0, {"COLUMNS": "x", "LINES": "0"}, 80, 24),
    (100, 0, {"COLUMNS": "60"}, 100, 24), (60, 10, {"COLUMNS": "120", "LINES": "50"}, 60, 10)]


def test_a_terminal_that_does_not_tell_its_size(home):
    for columns, rows, environ, is_wide, is_high in SIZES:
        with home.terminal("top", columns=columns, rows=rows, **environ) as terminal:
            shown = terminal.wait_for(rb"\x1b\[H((?:[^\x1b]|\x1b\[(?:2K|\d*m))*)\x1b\[J")[1].decode()
            assert shown.count("\n") == is_high - 1 and "q ends" in shown, (columns, environ)
            row = re.search(r"\x1b\[7m(> ([^\x1b]*))\x1b\[0m", shown)
            assert len(row[1]) == is_wide and home.running in row[2], "the chosen row is in reverse"

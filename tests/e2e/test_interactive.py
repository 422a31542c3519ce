"""Interactive jobs: `nexus run --tty` at a terminal, which is tmux here."""

import re

import pytest
from console import Home, Tmux, add
from live import read, until

BASH = 'PS1="here> " exec bash --norc --noprofile -i'


@pytest.fixture(scope="module")
def home():
    with Home(gpus=20, retry_backoff_seconds=0.1, kill_grace_seconds=1) as made:
        yield made


def last_job(home):
    return home.client().jobs()[-1]


def logs(home):
    return read(home.file("logs", f"job_{last_job(home)['id']}", "stdout.log"))


def await_prompt(terminal):
    terminal.wait_for(r"^here>\n*\Z")


def test_a_shell_has_keys_size_and_exit_code(home):
    with home.tmux("run", "--tty", BASH, TERM="xterm-256color", COLORTERM="truecolor", COLUMNS="7") as terminal:
        await_prompt(terminal)
        terminal.type("stty size; echo $TERM,$COLORTERM")
        terminal.wait_for("^30 100\nscreen-256color,$")
        terminal.resize(70, 20)
        until(lambda: terminal.type("clear; stty size") or re.search("^20 70$", terminal.picture(), re.MULTILINE), terminal.picture)
        terminal.type("clear; echo begun; sleep 600")
        terminal.wait_for("^begun$")
        terminal.press("C-c")
        await_prompt(terminal)
        terminal.type("echo code $?; exit 7")
        terminal.wait_for("ended with 7")
        assert re.search(r"^nexus: job \w+ failed \(exit 7\); what it printed: nexus logs \w+$", terminal.picture(), re.MULTILINE)
    assert last_job(home)["exit_code"] == 7 and "code 130\n" in logs(home)


def test_vim(home):
    path = home.folder / "text"
    with home.tmux("run", "--tty", f"vim -u NONE {path}") as terminal:
        terminal.wait_for(r"(^~ *\n){28}")
        terminal.resize(70, 20)
        until(lambda: terminal.press("C-l") or (re.search(r"^~ *\n.*\Z", terminal.picture().rstrip("\n"), re.MULTILINE)
              and terminal.picture().count("\n") == 20))
        terminal.press("i")
        terminal.type("one")
        terminal.call("send-keys", "-l", "two")
        terminal.press("Escape")
        terminal.type(":x")
        terminal.wait_for("ended with 0")
    assert path.read_text() == "one\ntwo\n"


def test_python(home):
    with home.tmux("run", "--tty", "python3 -q") as terminal:
        terminal.wait_for("^>>>$")
        terminal.type("6 * 7")
        terminal.wait_for("^42$")
        terminal.type("import time; print('be' + 'gun'); time.sleep(600)")
        terminal.wait_for("^begun$")
        terminal.press("C-c")
        terminal.wait_for("^KeyboardInterrupt$")
        terminal.type("exit(3)")
        terminal.wait_for("ended with 3")


SCREEN = ["screen", "-c", "/dev/null", "sh", "-c", Tmux.TELLING, "sh"]


@pytest.mark.parametrize("inside, key, presses", [((), "Ctrl-A D", ["C-a", "d"]), (SCREEN, "Ctrl-A a D", ["C-a", "a", "d"])],
                         ids=["at a terminal", "inside screen"])
def test_it_is_left_and_goes_on(home, inside, key, presses):
    with home.tmux("run", "--tty", BASH, inside=inside) as terminal:
        terminal.wait_for(f"^nexus: on \\S+: {key} leaves; keys and Ctrl-C go to the program$")
        await_prompt(terminal)
        terminal.press(*presses)
        terminal.wait_for("ended with 0")
        job_id = last_job(home)["id"]
        assert f"nexus: job {job_id} goes on; nexus attach {job_id} comes back to it\n" in terminal.picture()
    with home.tmux("attach", job_id) as terminal:
        await_prompt(terminal)
        terminal.type("exit 9")
        terminal.wait_for("ended with 0")
        assert f"nexus: job {job_id} failed (exit 9)" in terminal.picture()


def test_each_attempt_is_shown(home):
    with home.tmux("run", "--tty", "--retries", "1", "echo attempt; read code; exit $code") as terminal:
        for code in (4, 0):
            terminal.wait_for("^attempt$")
            terminal.type(str(code))
            terminal.wait_for("this terminal is over" if code else "ended with 0")
    assert [one["exit_code"] for one in last_job(home)["attempts"]] == [4, 0]


def test_one_that_is_over_at_once_shows_its_output(home):
    with home.tmux("run", "--tty", "test -t 0 && echo typed; exit 3") as terminal:
        terminal.wait_for(r"^typed\n(.*\n)*nexus: job \w+ failed \(exit 3\)\nended with 3$")


def test_ctrl_c_leaves_it_queued(home):
    home.main("pause")
    with home.tmux("run", "--tty", "bash") as terminal:
        terminal.wait_for("^nexus: it waits: the queue is paused")
        terminal.press("C-c")
        terminal.wait_for("ended with 130")
        job_id = last_job(home)["id"]
        assert f"job {job_id} still waits; nexus attach {job_id}; stop it: nexus cancel {job_id}" in terminal.picture()
    assert home.job(job_id)["status"] == "pending"
    home.main("cancel", job_id)
    home.main("resume")


def test_without_a_terminal_it_is_a_job_whose_stdout_is_one(home):
    done = home.run("run", "--tty", "test -t 1 && echo typed; exit 3", TERM="dumb")
    assert (done.code, done.out) == (3, "typed\r\n"), done


def test_it_is_refused_where_no_job_has_a_terminal(home):
    with Home(cpu_slots=1) as other:
        other.write_config(launcher="direct")
        count = len(home.client().jobs())
        there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": home.file("token").read_text().strip()}
        for one, environ, hint in ((home, there, "there: nexus run --tty bash"), (other, {}, 'launcher = "screen" gives them one')):
            with one.tmux("run", "--tty", "bash", **environ) as terminal:
                terminal.wait_for("ended with 2")
                picture = terminal.picture().replace("\n", "")
                assert f"hint: {hint}" in picture.replace("[jobs] ", "") and "nexus run --tty bash </dev/null" in picture
        assert other.client().jobs() == [] and len(home.client().jobs()) == count


def test_attach_and_leave(bare_home):
    job_id = add(bare_home, "echo in the window; read answer; echo \"got $answer\"; sleep 60")
    bare_home.wait_for_start(job_id)
    with bare_home.terminal("attach", job_id) as terminal:
        terminal.wait_for("in the window")
        terminal.type("hello\r")
        terminal.wait_for("got hello")
        terminal.type("\x01d")
        code, shown = terminal.end()
        assert code == 0 and f"job {job_id} goes on; nexus attach {job_id} comes back to it" in shown
    assert bare_home.job(job_id)["status"] == "running"

    def list_screens():
        done = bare_home.run("screens")
        assert done.code == 0
        return done.out

    until(lambda: re.search(rf"^\d+\.nexus_job_{job_id} +Detached", list_screens(), re.MULTILINE), list_screens)
    assert re.search(r"^\d+\.nexus  ", list_screens(), re.MULTILINE)
    with bare_home.terminal("attach", job_id, TERM="no-such-terminal") as terminal:
        terminal.wait_for("got hello")
        terminal.type("\x01d")
        assert terminal.end()[0] == 0
    assert bare_home.run("attach", job_id).code == 2, "without a terminal"
    other = bare_home.main("add", "echo begun; sleep 60").id
    with bare_home.terminal("attach", str(bare_home.wait_for_start(other)["gpu_index"])) as terminal:
        terminal.wait_for("begun")
        terminal.type("\x03")
        assert "failed (SIGINT)" in terminal.end()[1]
    bare_home.main("kill", job_id)
    for target, code in ((job_id, 4), ("zzz", 3), ("1", 3)):
        done = bare_home.run("attach", target)
        assert done.code == code and "hint:" in done.err

"""What others have written does nothing to the terminal of who reads it.

Every text that a server at NEXUS_URL, or who has a token, can choose is hostile here.
"""

import http.client
import http.server
import json
import os
import re
import shutil
import tempfile
import threading

import pytest
from console import Home
from live import free_port

# The window's title, its clipboard, a cleared screen, a question that it would answer by typing, 8-bit forms of these, a colour of
# nexus's own, a turned direction, a line that looks like another one of nexus's, one that is written over
EVIL = ("\x1b]0;owned\x07\x1b]52;c;cm0=\x07\x1b[2J\x1b[6n\x9b6n\x9d0;owned\x9c\x1bP1$r\x1b\\\x1b[92mFAKE\x1b[0m\u202efake\u2066\u200f"
        "\x85\u2028\nFAKE\r\nFAKE\x0bFAKE\x0cFAKE\rFAKE\x08\x7f\x00")
OWN = re.compile("\x1b\\[([017]|3[1-6]|92)m")


def check_harmless(shown):
    assert "owned" in shown or "fake" in shown or "FAKE" in shown, f"nothing of it was shown: {shown!r}"
    assert not re.search("\x1b\\[92mFAKE|^FAKE", shown, re.MULTILINE), f"it passes for words of nexus: {shown!r}"
    left = re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", OWN.sub("", shown))
    assert not left, f"{left} in {shown!r}"


def poison(fact, key=""):
    """An answer with all its texts hostile, except those that say what is what."""
    if isinstance(fact, dict):
        return {name: poison(inner, name) for name, inner in fact.items()}
    if isinstance(fact, list):
        return [poison(inner, key) for inner in fact]
    if fact is None and key in ("waiting_for", "cause_line", "gpu_trouble", "unavailable", "used_by", "why"):
        return EVIL
    is_plain = not isinstance(fact, str) or key in ("id", "status", "status_history", "error", "job_ids") or key.endswith("_at")
    return fact if is_plain else fact + EVIL


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes on to the service at server.target, and poisons what it answers."""

    def pass_on(self):
        length = int(self.headers.get("Content-Length") or 0)
        line = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=60)
        line.request(self.command, self.path, self.rfile.read(length) or None, {
            name: text for name, text in self.headers.items() if name != "Host"})
        answer = line.getresponse()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"] or "text/plain")
        self.end_headers()
        body = answer.read()
        if answer.headers["Content-Type"] == "application/json":
            body = json.dumps(self.server.change(json.loads(body))).encode()
        elif body:
            body += EVIL.replace("\n", " ").encode()          # its lines are all its own
        self.wfile.write(body)
        line.close()

    do_GET = do_POST = do_DELETE = do_PATCH = pass_on

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def home():
    with Home(cpu_slots=20) as made:
        client = made.client()
        made.ended = client.add("exit 3", gpus=0, name="ended", group="g")
        client.wait([made.ended])
        made.running = client.add("sleep 600", name="running", group="g")
        made.wait_for_start(made.running)
        client.pause()
        made.pending = client.add("true", name="pending", group="g")
        yield made


@pytest.fixture
def evil(home):
    """A server for NEXUS_URL with its environment."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    server.daemon_threads, server.target, server.change = True, home.port, poison
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = home.file("token").read_text().strip()
    server.environ = {"NEXUS_URL": f"http://127.0.0.1:{server.server_address[1]}", "NEXUS_TOKEN": token}
    yield server
    server.shutdown()
    server.server_close()


READERS = ["status", "status --detailed", "queue", "history", "jobs", "show {running}", "show {ended}", "show {pending}", "why {pending}",
           "wait {ended}", "metrics", "health", "logs service", "show zzz", "kill {pending}", "add --gpus 99 true", "cancel {ended}",
           "retry {pending}", "add --dry-run true", "logs zzz", "logs {pending}"]


@pytest.mark.parametrize("words", READERS)
def test_nothing_of_a_server_speaks_to_the_terminal(home, evil, words):
    words = words.format(running=home.running, ended=home.ended, pending=home.pending).split()
    with home.terminal(*words, **evil.environ) as terminal:
        _, shown = terminal.end()
    check_harmless(shown)
    done = home.run(*words, **evil.environ)                 # to a file, which somebody looks at later
    assert "\x1b" not in done.out + done.err
    check_harmless((done.out + done.err).replace("\r\n", "\n"))


def test_the_watched_status_is_as_clean(home, evil):
    with home.terminal("status", "--watch", **evil.environ) as terminal:
        terminal.wait_for("q ends")
        terminal.wait_for("\x1b[H")
        shown = terminal.wait_for(re.compile(b"[\\s\\S]*?q ends").pattern)[0].decode()
        check_harmless(re.sub("\x1b\\[(2K|H|J|\\?25l|\\?7l)", "", shown).replace("\r\n", "\n"))


def test_json_stays_what_it_was(home, evil):
    for words in (["show", home.running], ["status"], ["jobs"]):
        shown = home.main(*words, "--json", **evil.environ)
        assert shown.out.isprintable() or set(filter(lambda letter: not letter.isprintable(), shown.out)) == {"\n"}
        assert EVIL in json.dumps(shown.json, ensure_ascii=False) or "owned" in json.dumps(shown.json)
    assert home.main("show", home.running, "--json", **evil.environ).json["command"] == "sleep 600" + EVIL


def test_a_completed_word_runs_nothing(home, evil):
    """A shell may expand what it offers, and runs it when it is taken over."""
    evil.change = lambda jobs: [{**job, "id": "$(touch owned)"} for job in jobs]
    assert home.run("complete", "kill", "", **evil.environ).out == ""


def test_a_directory_that_somebody_with_a_token_chose(home):
    token = home.run("token", "create", "mallory").out.strip()
    place = tempfile.mkdtemp(prefix="d", dir="/tmp")            # short: what is shown of a long path may lack its middle
    folder = f"{place}/" + EVIL.replace("\x00", "")
    os.makedirs(folder)
    line = http.client.HTTPConnection("127.0.0.1", home.port, timeout=60)
    line.request("POST", "/queue", json.dumps({"command": "true", "cwd": folder, "gpus": 0}), {
        "Authorization": f"Bearer {token}", "Content-Type": "application/json"})
    answer = line.getresponse()
    told = json.loads(answer.read())
    assert answer.status == 200, told
    shutil.rmtree(place)
    home.main("resume")
    for words in (["wait", told["id"]], ["show", told["id"]], ["jobs"], ["history"]):
        with home.terminal(*words) as terminal:
            check_harmless(terminal.end()[1])
    check_harmless(home.file("service.log").read_text(encoding="utf-8"))       # its window in screen shows it as it is
    home.main("pause")

"""Messages about ended jobs: the lines of the guide, each against a stand-in for where it sends them; and the ends of groups."""

import email
import email.policy
import http.server
import json
import pathlib
import re
import sys
import threading

import live
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GUIDE = (pathlib.Path(__file__).resolve().parents[2] / "docs/guide.md").read_text(encoding="utf-8")
BLOCKS = {  # {what it is for: the block}, by the line before it
    heading.split()[0].strip(",:"): block for heading, block in re.findall(
        r"(?m)^([^\n]+):\n\n```toml\n(.*?)```", GUIDE.partition("### Mail and chats")[2], re.DOTALL)}
LINES = {("mail" if "sendmail" in block else name): tomllib.loads(block)["hooks"]["on_finish"] for name, block in BLOCKS.items()}
SECRET = "T0S3CR3T"
OUTPUT = """"}], 'x' `id` $(id) %s \\n \\" <!channel> \u00e9 ."""      # what a job prints last


def test_each_has_its_line():
    assert set(LINES) == {"mail", "ntfy", "Slack", "Telegram", "Teams"}


class Receiver(http.server.ThreadingHTTPServer):
    """Takes what is sent, and looks at that moment for the address among the arguments of all programs."""

    def __init__(self):
        received = self.received = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers["Content-Length"]))
                seen = live.find_commands(SECRET)
                received.append((self.path, self.headers["Content-Type"], content.decode(), seen))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def await_text(receiver, read):
    """The text that is shown where it was sent, which `read` finds in what has arrived."""
    live.until(lambda: receiver.received, "the message")
    path, kind, content, seen = receiver.received[0]
    assert path == f"/{SECRET}" and seen == [], "its address is no argument"
    return read(kind, content)


def read_json(kind, content):
    assert kind == "application/json"
    return json.loads(content)


def read_slack(kind, content):
    block, = read_json(kind, content)["blocks"]
    assert block["type"] == "section" and block["text"]["type"] == "plain_text", "in which <!channel> calls nobody"
    return block["text"]["text"]


def read_telegram(kind, content):
    body = read_json(kind, content)
    assert body.keys() == {"chat_id", "text"} and isinstance(body["chat_id"], int), "without parse_mode it is plain text"
    return body["text"]


def read_teams(kind, content):
    attachment, = read_json(kind, content)["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive" and attachment["content"]["type"] == "AdaptiveCard"
    return attachment["content"]["body"][0]["text"]


READERS = {"ntfy": lambda kind, content: content, "Slack": read_slack, "Telegram": read_telegram, "Teams": read_teams}


def end_job(box):
    """The lines of the message about a job that fails, after what no message may take for its own syntax."""
    box.folder.joinpath("output").write_text(OUTPUT + "\n")
    job = box.wait(box.add("sleep 1; cat output >&2; exit 3", name="a 'b' \"c\" $d", cwd=str(box.folder)), "failed")
    return [f"job {job['id']} (a 'b' \"c\" $d) failed (exit 3)", OUTPUT, f"runtime {int(job['runtime_seconds'])}s",
            f"https://gpu1.example.org/nexus/#/jobs/{job['id']}"]


@pytest.mark.parametrize("name", READERS)
def test_a_line_of_the_guide_sends_a_message(name):
    with Receiver() as receiver, live.Box(is_starting=False, is_supervised=False) as box:
        path = box.folder / ".nexus-hook"
        path.write_text(f'url = "{receiver.url}"\n')
        path.chmod(0o600)
        box.write_config(on_finish=LINES[name], public_url="https://gpu1.example.org/nexus/")
        box.start()
        expected = end_job(box)
        assert await_text(receiver, READERS[name]) == "\n".join(expected)
        assert "on_finish" not in box.log()


def test_the_line_of_the_guide_sends_mail():
    with live.Box(is_starting=False, is_supervised=False) as box:
        sendmail, sent = box.bin / "sendmail", box.folder / "sent"
        sendmail.write_text(f'#!/bin/sh\necho "$@" > {sent}.words\ncat > {sent}.new\nmv {sent}.new {sent}\n')
        sendmail.chmod(0o755)
        box.write_config(on_finish=LINES["mail"], public_url="https://gpu1.example.org/nexus/")
        box.start()
        expected = end_job(box)
        live.until(sent.exists, "the mail")
        mail = email.message_from_bytes(sent.read_bytes(), policy=email.policy.default)
        assert mail["To"] == "ann@example.org" and mail["Subject"] == f"nexus: {expected[0]}" and live.read(f"{sent}.words") == "-t -i\n"
        assert mail.get_content().splitlines() == expected


def test_the_end_of_a_group_is_told_once_for_each_time_that_jobs_were_added():
    """Not while something of it waits or runs, or has just ended; also by the next service."""
    with live.Box(is_starting=False, cpu_slots=8, is_supervised=False) as box:
        told = box.path("told")
        box.write_config(on_group_finish=f'printf "%s|" "$NEXUS_GROUP" "$NEXUS_JOB_MESSAGE" >> {told}; echo >> {told}',
                         public_url="http://gpu1:6234")

        def read():
            return re.sub("runtime [0-9a-z ]+", "runtime T", live.read(told)).split("|\n")[:-1]

        def is_recorded(job_id):
            """Whether the last that the disk has of a job is not that its group's end is to be told."""
            lines = [line for name in ("state.json", "journal.jsonl") for line in live.read(box.home / name).splitlines()]
            return "is_group_due" not in [line for line in lines if f'"{job_id}"' in line][-1]

        box.serve("nexus.GROUP_QUIET_S = 1.0")
        box.wait(box.add("true"), "completed")
        gate = box.path("gate")
        ids = [box.add(f"until [ -e {gate} ]; do sleep 0.05; done", gpus=0, group="g h") for _ in range(3)]
        bad = box.add("echo oh dear >&2; exit 3", gpus=0, group="g h")
        lost = box.add("true", gpus=0, group="g h", after=[bad])
        box.wait(lost, "cancelled")
        last = box.add("true", gpus=0, group="g h", after=ids)
        box.wait(box.add("sleep 1.5", gpus=0), "completed")
        assert read() == [], "others of the group run"
        pathlib.Path(gate).touch()
        box.wait(last, "completed")
        live.until(lambda: len(read()) == 1, "the message")
        live.until(lambda: is_recorded(last), "its record: a service that is killed before says it again")
        first, = read()
        assert first == "\n".join([
            "g h|group g h has ended: 4 completed, 1 failed, 1 cancelled",
            f"job {bad} (echo oh dear >&2; exit 3) failed (exit 3) oh dear",
            f"job {lost} (true) cancelled (dependency) it was to come after job {bad}, which failed (exit 3)",
            "runtime T", "http://gpu1:6234/#/?group=g%20h"])
        box.kill_service()
        box.serve("nexus.GROUP_QUIET_S = 600")
        later = box.add("true", gpus=0, group="g h")
        box.wait(later, "completed")
        box.wait(box.add("sleep 1.5", gpus=0), "completed")
        assert len(read()) == 1, "it has just ended"
        box.kill_service()
        box.serve("nexus.GROUP_QUIET_S = 1.0")
        live.until(lambda: len(read()) == 2 and is_recorded(later), "the second message")
        assert read()[1].startswith("g h|group g h has ended: 1 completed\nruntime T\nhttp://gpu1:6234")
        box.kill_service()
        box.serve("nexus.GROUP_QUIET_S = 0.1")
        box.wait(box.add("sleep 1", gpus=0), "completed")
        assert len(read()) == 2, "it was told"

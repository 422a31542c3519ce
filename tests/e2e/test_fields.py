"""A field that is added to the table of a job is everywhere, and so are a filter, a limit and a cause."""

import importlib.util
import json
import re
import sys
import urllib.error
import urllib.request

import pages
import pytest
from console import Done, Stream
from live import NEXUS, PATIENCE_S, Box, need_root, until
from test_node_limits import SSH

LAST_ROW = '''    tty: bool = optional(
'''                     # of a job: rows go before it
FILTER_PLACE, TEST_PLACE = '''    def make_test(self, now: float) -> Callable[[Job], bool]:
''', '''                    and self.group in (None, job.group or "")
'''


FIELD_ROWS = {LAST_ROW: '''    made_up: str | None = optional(
        None, LINE, "a meaning of its own", "asked kept public live live_in_slurm", flag="--made-up WORD", also=("--invented",),
        label="Something made up", line="what was made up: {}", slurm="wants {}, which Slurm does not know")
'''}


def load(path):
    """The module of that nexus.py."""
    spec = importlib.util.spec_from_file_location("made_up_nexus", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_order(module, **facts):
    """The job that a node is sent, for a job of these facts."""
    job = module.begin_attempt(module.Job("abc", "true", "/", "ann", 0.0, (0, 1, 1), environment="", **facts), gpu_indices=(0,))
    return module.decode("Order", json.loads(module.encode_json(module.Order(job, {})))).job


class Changed(Box):
    """A home with a nexus.py that has further rows: {a line of it: what goes before that}."""

    def __init__(self, rows):
        super().__init__(gpus=4, launcher="direct", retry_backoff_seconds=0.1, is_starting=False)
        source = NEXUS.read_text(encoding="utf-8")
        for line, row in rows.items():
            assert source.count(line) == 1, line
            source = source.replace(line, row + line)
        self.script = self.folder / "nexus.py"
        self.script.write_text(source, encoding="utf-8")
        self.module = load(self.script)

    def run(self, *words, code=0):
        """What a command line prints, here: the service has a process of its own, and the nexus.py of this one."""
        out, err = Stream(), Stream()
        done = Done(self.module.main(words, self.environ, out, err), out.bytes, err.bytes)
        assert done.code == code, (words, done)
        return done.err if code else done.out

    def read(self, path, body=None, **headers):
        headers = {"Accept": "text/html", **({"Content-Type": "application/json"} if body else {}), **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body and json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def fetch(self, path, body=None, **headers):
        return json.loads(self.read(path, body, **headers))


@pytest.fixture(scope="module")
def shared():
    """With all rows of all tests at once, and as a node n1."""
    need_root()
    with Changed(join_rows(FIELD_ROWS, REPEATED_ROWS, FILTER_ROWS, CAUSE_ROWS, LIMIT_ROWS, GROUP_LIMIT)) as made:
        config = made.home / "config.toml"
        config.write_text(config.read_text().replace("[jobs]\n", "[jobs]\nmax_output_mib = 4\n"))
        for folder in ("far", "far-bin"):
            (made.folder / folder).mkdir()
        (made.folder / "far" / "config.toml").write_text(
            '[service]\nrefresh_rate_seconds = 0.3\n[jobs]\nlauncher = "direct"\nmax_output_mib = 0.001\n')
        (made.bin / "ssh").write_text(SSH.format(folder=made.folder))
        (made.bin / "ssh").chmod(0o755)
        (made.folder / "far-bin" / "python3").symlink_to(sys.executable)
        yield made


@pytest.fixture
def changed(shared):
    yield shared
    if shared.pid():
        pages.clear_jobs(shared)


def join_rows(*tables):
    rows = {}
    for table in tables:
        for line, row in table.items():
            rows[line] = rows.get(line, "") + row
    return rows


def test_a_row_is_all_that_a_field_of_a_job_takes(changed):
    """Its option, help, check, JSON, description, who sees it, what a retry keeps, what a node is sent, what a restart finds.

    And the page's form, what `show` says, whether a running job takes it, and why Slurm does not.
    """
    run, read, ask = changed.run, changed.read, changed.fetch
    module = changed.module
    job = read_order(module, made_up="blue")
    assert job.made_up == "blue", "a node is sent it"
    assert module.find_slurm_reason(job).detail == "wants made_up, which Slurm does not know" and "made_up" in module.LIVE_IN_SLURM
    help = " ".join(run("help", "add").split())
    assert "--made-up WORD, --invented WORD a meaning of its own" in help
    assert "--made-up/--invented must be one line of at most 200 bytes" in run("add", "--made-up", " ", "true", code=2)
    job_id = run("add", "--made-up", "blue", "exit 3").strip()
    run("wait", job_id, code=3)
    assert json.loads(run("show", job_id, "--json"))["made_up"] == "blue" and "  what was made up: blue\n" in run("show", job_id)
    again = run("retry", job_id).strip()
    run("wait", again, code=3)
    sleeper = run("add", "--invented", "red", "sleep 1000").strip()
    token = run("token", "create", "ann").strip().splitlines()[-1]
    run("restart")
    until(lambda: ask(f"/jobs/{sleeper}")["status"] == "running")
    run("edit", sleeper, "--made-up", "green")
    assert ask(f"/jobs/{sleeper}")["made_up"] == "green", "it is changed while the job runs"
    assert ask(f"/jobs/{again}")["made_up"] == "blue", "a retry keeps it, and so does the disk"
    told = {"Authorization": f"Bearer {token}", "X-Forwarded-For": "192.0.2.7"}
    assert [job["made_up"] for job in ask("/jobs", **told)].count("blue") == 2, "others see it"
    [field] = [row for row in json.loads(re.search(r"const FIELDS = (.*);", read("/"))[1]) if row["name"] == "made_up"]
    assert (field["label"], field["help"], field["unit"]) == ("Something made up", "a meaning of its own", "text")
    assert field["forms"] == ["add", "pending", "running", "retry"], "the page's forms ask for it"
    schemas = ask("/openapi.json")["components"]["schemas"]
    for name in ("Submission", "Job"):
        assert schemas[name]["properties"]["made_up"]["description"] == "a meaning of its own", name
    with pytest.raises(urllib.error.HTTPError) as refused:
        read("/queue", {"command": "true", "made_up": "a\nb"})
    assert "made_up must be one line" in json.loads(refused.value.read())["message"]


REPEATED_ROWS = {LAST_ROW: '''    tags: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": TEXT}, "tags of its own", "asked kept repeats", flag="--tag K=V", show=dict,
        convert=lambda tags: tuple(tags.items()))
    words: tuple[str, ...] = optional((), list_of(LINE), "words of its own", "asked kept repeats", flag="--word W")
''', FILTER_PLACE: '''    tag: Sequence[str] = optional(
        (), list_of(matching("=", "K=V")), "only those with all these tags", "repeats", flag="--tag K=V", option="those with this tag",
        told="with")

''', TEST_PLACE: '''                    and {*self.tag} <= {f"{key}={word}" for key, word in job.tags}
'''}


def test_a_row_is_all_that_an_option_that_repeats_takes(changed, tmp_path):
    """It makes a list or an object, in commands, lines of scripts, and filters.  `edit` and `retry` have it, too."""
    run, ask = changed.run, changed.fetch
    assert "--tag must be NAME=VALUE" in run("add", "--tag", "x", "true", code=2)

    def told(job_id):
        return {name: ask(f"/jobs/{job_id}")[name] for name in ("tags", "words")}

    run("pause")
    job_id = run("add", "--tag", "a=1", "--tag", "b=x=2,3", "--tag", "a=2", "--word", "v,w", "--word", "u", "exit 3").strip()
    assert told(job_id) == {"tags": {"a": "2", "b": "x=2,3"}, "words": ["v,w", "u"]}
    shown = run("show", job_id)
    assert "  tags: a=2, b=x=2,3\n" in shown and "  words: v,w, u\n" in shown
    script, lines = tmp_path / "job.sh", tmp_path / "lines"
    script.write_text("#!/bin/sh\n#NEXUS --tag a=1 --tag c=1\n#NEXUS --tag d=1 --word u\ntrue\n")
    lines.write_text("true\nfalse\n")
    of_script = run("add", "--tag", "a=2", "--word", "v", str(script)).strip()
    assert told(of_script) == {"tags": {"a": "2", "c": "1", "d": "1"}, "words": ["v"]}, "what is typed wins"
    of_lines = run("add", "--tag", "e=1", "--file", str(lines)).split()
    assert [told(one)["tags"] for one in of_lines] == [{"e": "1"}] * 2
    for words, query, chosen in ((["a=2"], "tag=a=2", [job_id, of_script]), (["a=2", "c=1"], "tag=a=2&tag=c=1", [of_script])):
        options = [word for one in words for word in ("--tag", one)]
        assert [job["id"] for job in json.loads(run("jobs", "--json", *options))] == chosen
        assert [job["id"] for job in ask(f"/jobs?{query}")] == chosen
    run("edit", job_id, "--tag", "a=3", "--tag", "f=1", "--word", "none")
    assert told(job_id) == {"tags": {"a": "3", "f": "1"}, "words": []}
    run("edit", of_script, "--tag", "none")
    assert told(of_script) == {"tags": {}, "words": ["v"]}
    run("cancel", job_id)
    assert told(run("retry", job_id).strip())["tags"] == {"a": "3", "f": "1"}
    assert told(run("retry", job_id, "--tag", "g=1").strip())["tags"] == {"g": "1"}


FILTER_ROWS = {LAST_ROW: '''    pairs: tuple[tuple[str, str], ...] = optional(
        (), {"type": "object", "additionalProperties": TEXT}, "pairs", "asked kept", flag="--pairs K=V,...", show=dict,
        text=matching("^[^=]+=", "pairs like a=1,b=2"),
        parse=lambda text: dict(pair.split("=", 1) for pair in text.split(",")), convert=lambda pairs: tuple(pairs.items()))
''', FILTER_PLACE: '''    pair: Sequence[str] = optional(
        (), list_of(matching("=", "K=V")), "only those with all these pairs", flag="--pair K=V", option="those with this pair",
        told="with", text=TEXT, parse=lambda text: [text])

''', TEST_PLACE: '''                    and {*self.pair} <= {f"{key}={word}" for key, word in job.pairs}
'''}


def test_a_row_and_a_line_are_all_that_a_filter_takes(changed):
    """Lists and bodies have it, and the options of all commands that choose jobs.

    It is of a field that is kept otherwise than JSON has it, and its texts have commas.
    """
    run, ask = changed.run, changed.fetch
    run("pause")
    both, one = (run("add", "--pairs", pairs, "true").strip() for pairs in ("a=1,b=2", "a=1"))
    comma = ask("/queue", {"command": "true", "pairs": {"a": "1,2"}})["id"]
    assert ask(f"/jobs/{both}")["pairs"] == {"a": "1", "b": "2"} and ask(f"/jobs/{one}")["pairs"] == {"a": "1"}
    assert ask("/queue", {"command": "true", "pairs": {"a": "1"}, "dry_run": True})["jobs"][0]["pairs"] == {"a": "1"}
    for query, chosen in (("pair=a=1", [both, one]), ("pair=a=1&pair=b=2", [both]), ("pair=a=1,2", [comma]), ("pair=b=3", [])):
        for path in ("/queue", "/jobs", "/status"):
            answer = ask(f"{path}?{query}{'&after=0' if path == '/status' else ''}")
            assert (answer["waiting"] if path == "/status" else [job["id"] for job in answer]) == chosen, (path, query)
    for words in (["queue"], ["jobs"]):
        assert [job["id"] for job in json.loads(run(*words, "--json", "--pair", "b=2"))] == [both]
    for command in ("jobs", "history", "queue", "cancel", "kill", "remove", "wait", "pause", "resume", "edit", "move", "retry",
                    "logs", "clear", "show", "why"):
        assert "--pair K=V" in run("help", command), command
    assert "no job with 'c=3'" in run("wait", "--pair", "c=3", code=3)
    assert ask("/jobs/cancel", {"pair": ["a=1,2"]})["ids"] == [comma]
    run("cancel", "--pair", "b=2")
    run("wait", "--pair", "b=2", code=1)
    assert ask("/jobs/retry", {"pair": ["b=2"], "status": "cancelled"})["ids"]
    run("clear", "--pair", "b=2")
    assert {job["id"] for job in ask("/jobs")} & {both, one, comma} == {one, comma}


CAUSE_ROWS = {
    '    KILLED: Cause("somebody cancelled or killed it", cancels=True, is_stop=True),\n': """\
    "no-module": Cause("it lacks a module of Python", remedy="nexus retry {id} --conda NAME", blames_gpu=True),
""",
    '    texts = [evidence.stderr] if signal else [evidence.stderr, evidence.stdout]\n': """\
    if line := next((line for line in evidence.stderr.splitlines() if line.startswith("ModuleNotFoundError")), None):
        return "no-module", line
"""}


def test_a_row_is_all_that_a_cause_takes(changed):
    """Beside the rule that decides it: `show`, lists, messages, the API, its document, the page and metrics have it."""
    run, read, ask = changed.run, changed.read, changed.fetch
    line = "ModuleNotFoundError: No module named 'torch'"
    job_id = run("add", "--retries", "1", "--gpus", "0", f'echo "{line}" >&2; exit 1').strip()
    hint = f"hint: nexus retry {job_id} --conda NAME"
    waited = run("wait", job_id, code=1)
    assert f"job {job_id} failed (no-module): {line}" in waited and hint in waited
    job, shown = ask(f"/jobs/{job_id}"), run("show", job_id)
    assert [(one["cause"], one["cause_line"], one["outcome"]) for one in job["attempts"]] == [("no-module", line, "no-module")] * 2
    assert "Job " + job_id + ": failed (no-module)" in shown and hint in shown
    assert "no-module" in run("jobs") and 'cause="no-module"} 1' in read("/metrics")
    schemas = ask("/openapi.json")["components"]["schemas"]
    for name in ("Job", "Attempt"):
        assert "; no-module: it lacks a module of Python; " in schemas[name]["properties"]["cause"]["description"], name
    assert '"no-module": {"meaning": "it lacks a module of Python", "remedy": "nexus retry {id} --conda NAME"' in read("/")


LIMIT_ROWS = {      # the key, what is bounded, when it is reached, how it is measured; a job's own
    '    max_running_per_user: int = optional(\n': '''    max_output_mib: float = optional(
        0, number_in(0, 1000000), "a job with more output is stopped; 0 = any", cause="output")
''',
    '    runtime_s: float | None = None              # None: not known\n': '''    output_mib: float = 0.0
''',
    '    return (LIMITS[key], words) if key else None\n': '''    if limits.max_output_mib and use.output_mib > limits.max_output_mib:
        key, words = "max_output_mib", f"it wrote {use.output_mib:.0f} MiB; max_output_mib is {limits.max_output_mib:g}"
''',
    '            runtime_s=self.hosted.find_runtime_s(),\n':
        '''            output_mib=sum(measure_logs(self.hosted.disk, self.hosted.folder)) / 2**20,
''',
    LAST_ROW: '''    max_output_mib: float | None = optional(
        None, number_in(0, 1000000), "stop it when it has written more", "asked kept", flag="--max-output MIB")
'''}


def test_a_limit_takes_four_places(changed):
    """It holds here and on a node, whose configuration does not count.  A job's own, where that has a row, counts more."""
    run = changed.run
    assert "max_output_mib = 0 " in run("config", "sample")
    run("node", "add", "n1")
    until(lambda: changed.fetch("/nodes")[1]["is_reachable"], lambda: changed.fetch("/nodes"))
    for where in (node["name"] for node in changed.fetch("/nodes")):
        add = ("add", "--node", where, "--gpus", "0")
        much, own, more = [run(*add, *words, f"head -c {mib}M /dev/zero; {then}").strip() for mib, words, then in (
            (5, [], "sleep 600"), (3, ["--max-output", "2"], "sleep 600"), (5, ["--max-output", "6"], "sleep 2"))]
        for job_id, limit in ((much, 4), (own, 2)):
            run("wait", job_id, code=128 + 15)
            job = changed.fetch(f"/jobs/{job_id}")
            assert job["cause"] == "output" and f" MiB; max_output_mib is {limit}" in job["cause_line"], (where, job)
        run("wait", more)


GROUP_LIMIT = {     # what a group keeps, the option, the sum, the check
    "    lost: Words | None = None       # the last job": "    gpus: float = 0.0\n",
    "    llm: str | None = optional(\n": '''    max_group_gpus: float | None = optional(
        None, number_in(1, 1000), "how many GPUs its group has at once", "asked", flag="--max-group-gpus N", of_group="gpus")
''',
    "        self.groups, self.holds = state.groups, list_holds(state)\n": "        self.gpus_of_group = collections.Counter[str]()\n",
    "        self.in_all += 1\n": '        self.gpus_of_group[job.group or ""] += job.gpus\n',
    "        if self.most_of_user and self.of_user": '''        used = self.gpus_of_group[job.group or ""]
        if group and group.gpus and used + job.gpus > group.gpus:
            return Reason("quota", group.name, f"group {group.name} has {used:g} GPUs of {group.gpus:g}")
'''}


def test_a_limit_of_groups_takes_four_places(changed):
    """A field of Group, a row for its option, a sum and a step in Quotas: `add`, `edit`, `why` and GET /groups have it then."""
    run, ask = changed.run, changed.fetch
    assert "max_group_gpus is for a group, and this job has none" in run("add", "--max-group-gpus", "2", "true", code=2)
    *begun, waits = [run("add", "--group", "g", *words, "sleep 1000").strip() for words in (["--max-group-gpus", "2"], [], [])]
    until(lambda: [ask(f"/jobs/{job_id}")["status"] for job_id in begun] == ["running"] * 2)
    assert "group g has 2 GPUs of 2" in run("why", waits)
    assert [group["gpus"] for group in ask("/groups")] == [2]
    run("edit", waits, "--max-group-gpus", "none")
    until(lambda: ask(f"/jobs/{waits}")["status"] == "running")

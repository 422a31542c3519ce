"""README.md and docs/: every command, block, call, key and link in them works as it stands there.

A fenced block is of one of the KINDS.  A command in a `bash` block is run, but for those that ONLY_PARSED and BY_OTHERS name; each
line of nexus is read by its parser too, in the text as well.
"""

import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import forks
import live
import network
import pages
import pytest
from test_conda import Conda

import build
import nexus

TOP = pathlib.Path(__file__).resolve().parents[2]
PATHS = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (TOP / "docs").glob("*.md"))]
TEXTS = {path: (TOP / path).read_text() for path in PATHS}
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(path, kind, text) for path in PATHS for kind, text in FENCED.findall(TEXTS[path])]
PROSE = {path: FENCED.sub("", text) for path, text in TEXTS.items()}
SPANS = [(path, span) for path, text in PROSE.items() for span in re.findall(r"`([^`\n]+)`", text)]
KINDS = {"bash", "python", "toml", "csv", "json", "text", "yaml"}


def list_blocks(kind):
    """Parameters for a test of each block of this kind."""
    return [pytest.param(path, text, id=f"{path}:{text.strip().splitlines()[0][:40]}") for path, other, text in BLOCKS if other == kind]


def list_calls(block):
    """The statements of a block: a here-document belongs to what it is given to."""
    block = re.sub(r"(<<'END'\n.*?\nEND)\n", lambda match: match[1].replace("\n", "\0") + "\n", block, flags=re.DOTALL)
    return [line.replace("\0", "\n") for line in block.splitlines() if line.strip()]


STATEMENTS = [(path, line) for path, kind, text in BLOCKS if kind == "bash" for line in list_calls(text)]


def test_every_block_is_of_a_kind_that_is_checked():
    assert [(path, kind) for path, kind, _ in BLOCKS if kind not in KINDS] == []
    for path, text in PROSE.items():
        assert "```" not in text and "~~~" not in text, f"{path}: a fence that does not begin a line, or is not closed"


# README.md itself

def test_the_readme_is_short():
    assert len(TEXTS["README.md"].split()) <= 800


def test_its_first_commands_run_a_job_and_the_tests():
    first, second, *_ = (text for path, kind, text in BLOCKS if path == "README.md" and kind == "bash")
    assert " run " in list_calls(first)[0] and "NEXUS_MOCK_GPUS" in list_calls(first)[0]
    assert second == "tests/run\n"


@pytest.mark.parametrize("path", PATHS)
def test_links(path):
    for target in re.findall(r"\]\(([^)]+)\)", PROSE[path]):
        name, _, anchor = target.partition("#")
        assert "://" not in target, "a link that nobody checks"
        found = (TOP / path).parent / name if name else TOP / path
        assert found.is_file() and found.resolve().is_relative_to(TOP.resolve()), f"{path} links to {target}"
        headings = re.findall(r"^#+ (.*)$", found.read_text() if anchor else "", re.MULTILINE)
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


def test_every_document_is_found_from_the_readme():
    assert {path for path in PATHS if f"]({path})" not in TEXTS["README.md"]} == {"README.md"}


def test_addresses_are_those_nexus_has():
    """`localhost` may be an address that another user has."""
    text = "".join(text for path, text in TEXTS.items() if path != "docs/security.md")
    assert "127.0.0.1:6234" in text and "localhost:" not in text


# Lines of nexus, in blocks and in the text

def words_of(line):
    """What a line of the shell gives to nexus; None, when that is not what it calls."""
    words = shlex.split(line, comments=True)
    words = words[:words.index(">")] if ">" in words else words
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    called = words[1:2] == ["nexus.py"] or words[1:2] == ["~/.nexus/nexus.py"]
    return words[1:] if words[:1] == ["nexus"] else words[2:] if words[:1] == ["python3"] and called else None


def check_words(words):
    """That nexus has this command, with these options.  Raises: NexusError."""
    if words == ["--version"]:
        return
    name, *rest = words or ["status"]
    command = nexus.find_command([name], nexus.COMMANDS)
    nexus.parse_words(command, [{"GPU": "0"}.get(word, word) for word in rest], io.StringIO())


LINES = [(path, line) for path, line in STATEMENTS if words_of(line) is not None]
LINES += [(path, span) for path, span in SPANS if re.match(r"(nexus|python3 nexus\.py|python3 ~/\.nexus/nexus\.py)( |$)", span)]


@pytest.mark.parametrize("path, line", [pytest.param(*each, id=f"{each[0]}:{each[1]}") for each in dict.fromkeys(LINES)])
def test_nexus_takes_these_words(path, line):
    assert ";" not in re.sub(r'"[^"]*"', "", line).partition("#")[0], "one command a line"
    names = [f"nexus {' '.join(names)}" for command in nexus.COMMANDS for names in (
        [command.name], *([command.name, verb.name] for verb in command.verbs))]
    if (path, line) in STATEMENTS or line not in names:         # the text may name a command without what it takes
        check_words(words_of(line))


def test_options_exist():
    """Those that stand alone in the text."""
    commands = [each for command in nexus.COMMANDS for each in (command, *command.verbs)]
    known = {flag for command in commands for argument in command.arguments for flag in argument[0]}
    others = {"docs/coming-from.md", "docs/slurm.md"}        # of task-spooler, sbatch ...
    used = {span.split()[0].partition("=")[0] for path, span in SPANS if span.startswith("--") and path not in others}
    assert used <= known | {"--cuda", "--unix-socket", "--"}    # of what jobs run, and of curl; before a command


# Keys of config.toml

def test_config_keys_exist():
    keys = {(name, key) for name, table in nexus.SECTIONS.items() for key in table.FIELDS}
    named = {(section, key) for _, span in SPANS for section, key in re.findall(r"^\[([a-z]+)\] ([a-z_]+)", span)}
    assert named <= keys
    alone = {span.partition(" = ")[0] for _, span in SPANS if re.fullmatch(r"[a-z]+_[a-z_]+( = .*)?", span)}
    assert {"jobs_file", "llm_config", "allowed_script_paths", "guard_failures", "reserve_after_seconds", "history_limit",
            "node_lost_after_seconds", "max_submitted"} <= alone & {key for _, key in keys}
    ours = {span.partition(" = ")[0] for path, span in SPANS if path not in ("docs/http-api.md", "docs/coming-from.md", "docs/design.md")
            and re.fullmatch(r"[a-z]+_[a-z_]+( = .*)?", span)}
    # the kernel's, state.json's, a job's
    assert ours <= {key for _, key in keys} | {"sock_diag", "no_new_privs", "paused_gpus", "last_line"}


def test_variables_exist():
    source = live.NEXUS.read_text()
    named = {name for text in TEXTS.values() for name in re.findall(r"\b(?:NEXUS|CUDA)_[A-Z_]+[A-Z]\b", text)}
    assert [name for name in sorted(named) if name not in source] == [] and "NEXUS_JOB_STATUS" in named


@pytest.mark.parametrize("path, text", list_blocks("toml"))
def test_configuration(path, text, tmp_path):
    (tmp_path / "config.toml").write_text(text)
    assert nexus.load_config(nexus.DISK, str(tmp_path / "config.toml"), {}) != nexus.Config()


@pytest.mark.parametrize("path, text", list_blocks("csv"))
def test_a_jobs_file(path, text):
    rows, faults = nexus.parse_jobs_file(text)
    assert len(rows) == 2 and not faults
    assert nexus.parse_jobs_file(f"{text}wrong\n")[1], "a wrong line is told"


@pytest.mark.parametrize("path, text", list_blocks("json"))
def test_an_llm_config(path, text, tmp_path):
    (tmp_path / "llm_config.json").write_text(text)
    models = ("qwen2.5-7b-inst", "another")
    assert [nexus.find_llm_share(nexus.DISK, str(tmp_path / "llm_config.json"), model) for model in models] == [0.5, 1]


# Calls of the API

def check_call(method, address):
    """That there is such a call, described, and that it takes these parameters."""
    path, _, query = address.partition("?")
    route = nexus.match_route(method, path.replace("/ID", "/abc"))[0]
    assert not route.summary or route.method.lower() in nexus.make_openapi(nexus.ROUTES, "1")["paths"][route.pattern]
    names = {part.partition("=")[0] for part in query.split("&") if part}
    assert names <= set(route.parameters), f"{address} takes {', '.join(route.parameters)}"


ADDRESSES = [(path, line) for path, line in STATEMENTS if re.match(r"(curl|wget) ", line)]


@pytest.mark.parametrize("path, line", [pytest.param(*each, id=f"{each[0]}:{each[1]}"[:80]) for each in ADDRESSES])
def test_curl_and_wget_call_what_there_is(path, line):
    line = line.partition("  #")[0]
    [address] = re.findall(r"\$(?:NEXUS_)?URL(/[^\s'\"]*)", line)
    method = re.findall(r"-X ([A-Z]+)", line) or ["POST" if re.search(r" (-d|-F) ", line) else "GET"]
    check_call(method[0], address)


def test_calls_in_the_text():
    calls = [(path, *span.split()) for path, span in SPANS if re.match(r"(GET|POST|PATCH|DELETE) /", span)]
    for _, method, address in calls:
        check_call(method, address)
    listed = {(method, address) for path, method, address in calls if path == "docs/http-api.md"}
    assert listed == {(route.method, route.pattern) for route in nexus.ROUTES if route.summary}, "each is listed there"
    for _, span in SPANS:
        if re.fullmatch(r"/(api|jobs|openapi|docs|metrics)\b\S*", span) and span != "/api":
            address = span.replace("ID", "abc")
            assert any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route.pattern), address) for route in nexus.ROUTES), span


def test_the_causes_in_the_guide():
    wanted = []
    for word, row in nexus.CAUSES.items():
        follows = "pending" if row.requeues else "cancelled" if row.cancels else "failed"
        wanted.append(f"| `{word}` | {row.meaning} | {follows} |")
    assert re.search(r"\| cause .*\n.*\n((?:\|.*\n)+)", TEXTS["docs/guide.md"])[1].splitlines() == wanted


# What is typed at a shell: as it stands there, but for the port, the host, the ids of jobs, and what jobs run

ONLY_PARSED = [                                 # by test_nexus_takes_these_words
    (r"nexus attach ", "it takes the terminal: tests/e2e/test_terminal.py"),
    (r"nexus run --tty ", "it takes the terminal: tests/e2e/test_interactive.py"),
    (r"nexus top", "it goes on for ever: test_looking.py"),
    (r"nexus logs abc --grep ", "it finds nothing in what a test's job prints: test_logs.py"),
]
BY_OTHERS = {                                   # blocks with tests of their own, by how they begin
    "NEXUS_HOME=~/.nexus-trial ": "test_the_trial_leaves_nothing_behind",
    "tests/run\n": "test_scripts_of_the_repository",
    "tests/run --fast\ntests/run tests/": "test_scripts_of_the_repository",
    "python3 build.py ": "tests/unit/test_build.py",
    "nexus node add gpuuser": "test_nodes_are_added_as_it_says",
    "#!/bin/bash\n#NEXUS --gpus 2 --name in-docker": "test_a_container_ends_with_its_job",
    "nexus restart\nnexus add --gpus 2 --timeout 2h": "test_slurm.py",
    "cat > nexus-status <<'END'": "test_the_three_commands_of_snakemake",
}
TRAINING = re.compile(r'"python \w+\.py\b')
BOBS_TOKEN = "bobs-secret-token"


def find_tester(text):
    if f"```bash\n{text}```" in TEXTS["docs/guide.md"].partition("\n## My day\n")[2].partition("\n## ")[0]:
        return "test_my_day.py"
    return next((tester for start, tester in BY_OTHERS.items() if text.startswith(start)), None)


def test_blocks_with_tests_of_their_own_are_there():
    """What is named here and not there would leave out a new block that begins so."""
    for start in BY_OTHERS:
        assert len([text for _, kind, text in BLOCKS if kind == "bash" and text.startswith(start)]) == 1, start
    for pattern, _ in ONLY_PARSED:
        assert any(re.match(pattern, line) for _, line in STATEMENTS), pattern


def make_program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_nexus(path, launch, python=sys.executable, program=live.NEXUS):
    """The command, which is a fork of a process that has loaded nexus.py: see forks.listen()."""
    make_program(path, f'exec {python} -I -S -c {shlex.quote(launch)} {program} "$@"')


def add_waiting(box):
    return box.add("true", gpus=0, after=[box.add("sleep 600", gpus=0)])


def make_job(box, line):
    """The id that stands for abc in a line: of a job as the command wants it."""
    verb = words_of(line)[0]
    if verb in ("kill", "attach"):
        return box.wait_started(box.add("sleep 600", gpu_ids=[1]))["id"]
    if verb in ("edit", "move", "remove", "why", "cancel", "pause", "resume"):
        return add_waiting(box)
    return box.wait(box.add("true"), "completed")["id"]


class Shell:
    """A box in which the lines of a block are typed."""

    def __init__(self, box, has_nexus=True):
        self.box, self.setting = box, ""
        folder = box.folder
        box.environ["PATH"] = f"{box.environ['PATH']}:{folder}/.local/bin"
        box.environ["EDITOR"] = "true"
        shutil.copy(live.NEXUS, folder / "nexus.py")
        if has_nexus:
            make_nexus(box.bin / "nexus", forks.listen(folder / "forks"))
        make_program(box.bin / "python3", f'exec {sys.executable} "$@"')
        make_program(box.bin / "nvidia-smi", "echo NVIDIA-SMI")
        box.environ["CONDA_EXE"] = Conda(str(box.path("conda"))).exe
        (folder / "my_script.py").write_text("print('hello')\n")
        (folder / "commands.txt").write_text("# two\ntrue\necho 2\n")
        git = ["git", "-c", "user.name=ann", "-c", "user.email=ann@x"]
        for words in (["init", "-q"], ["add", "commands.txt"], ["commit", "-q", "-m", "first"]):
            subprocess.run([*git, *words], cwd=folder, check=True, env=box.environ)

    def begin_block(self):
        """As if nothing had been typed before: the service runs, bob has his token and a job, and nobody else has one."""
        self.setting = ""
        if not self.box.pid():
            self.box.start()
        pages.clear_jobs(self.box)
        if self.box.call("GET", "/jobs?limit=1", Authorization=f"Bearer {BOBS_TOKEN}")[0] == 401:
            assert self.box.nexus("token", "create", "bob", BOBS_TOKEN).returncode == 0
        self.bobs = self.box.call("POST", "/queue", {"command": "sleep 600"}, Authorization=f"Bearer {BOBS_TOKEN}")[1]["id"]
        self.box.wait(self.bobs, "running")

    def adapt(self, line):
        """The line for this box."""
        box, line = self.box, line.replace("6234", str(self.box.port)).replace("/data/bob", "/tmp").replace("/data/exp", "/tmp")
        line = re.sub(r"([?&]wait)=[36]0", r"\1=1", line)                  # for bob's job, which goes on
        line = TRAINING.sub('"true', line).replace("/home/me/exp", "/tmp").replace("python train.py", "true").replace("A100", "Mock")
        line = re.sub(r"(/jobs/|/results/)abc\b", rf"\g<1>{self.bobs}", line)
        if "/queue/abc" in line:
            line = line.replace("/queue/abc", f"/queue/{add_waiting(box)}")
        if re.search(r"\babc\b|nexus kill 1$", line) and words_of(line):
            line = re.sub(r"\babc\b", make_job(box, line), line)
        return re.sub(r"\babd\b", make_job(box, line), line) if re.search(r"\babd\b", line) else line

    def type(self, line):
        if line.startswith("export "):
            self.setting = self.setting + line.replace("http://gpubox:6234", f"http://127.0.0.1:{self.box.port}") + "; "
            return
        line = self.adapt(line)
        is_stream = "follow=true" in line or line.startswith("curl -N ")
        if line.startswith("curl "):
            line = line.replace("curl ", f"curl -sS --fail-with-body --max-time {2 if is_stream else 60} ", 1)
        done = subprocess.run(["bash", "-c", self.setting + line], env=self.box.environ, cwd=self.box.folder, capture_output=True,
                              text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == (28 if is_stream else 0), (line, done)


@pytest.fixture(scope="module")
def shared_shell():
    with live.Box(gpus=4) as box:
        yield Shell(box)


@pytest.fixture
def shell(request):
    """One that others use, too, but for what installs nexus, in a home that has none."""
    if "nexus.py install" in request.node.callspec.params["text"]:
        with live.Box(gpus=4) as box:
            typed = Shell(box, has_nexus=False)
            typed.begin_block()
            yield typed
    else:
        typed = request.getfixturevalue("shared_shell")
        typed.begin_block()
        yield typed


@pytest.mark.smoke
@pytest.mark.parametrize("path, text", [each for each in list_blocks("bash") if not find_tester(each.values[1])])
def test_what_is_typed(shell, path, text):
    for line in list_calls(text):
        if not any(re.match(pattern, line) for pattern, _ in ONLY_PARSED):
            shell.type(line)


@pytest.mark.smoke
def test_the_trial_leaves_nothing_behind():
    """In an empty home; only the port is another than the usual one."""
    text = next(text for _, kind, text in BLOCKS if kind == "bash" and text.startswith("NEXUS_HOME=~/.nexus-trial "))
    folder = live.make_folder()
    try:
        home, programs = folder / "home of ann", folder / "bin"
        (home / ".nexus-trial").mkdir(parents=True, mode=0o700)
        programs.mkdir()
        (home / ".nexus-trial" / "config.toml").write_text(f"[service]\nport = {live.free_port()}\n")
        make_program(programs / "python3", f'exec {sys.executable} "$@"')
        shutil.copy(live.NEXUS, home / "nexus.py")
        environ = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "SCREENDIR": str(folder / "screen")}
        (folder / "screen").mkdir(mode=0o700)
        done = subprocess.run(["sh", "-e", "-c", text], env=environ, cwd=home, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "hello from GPU 0\n"), done
        assert os.listdir(home) == ["nexus.py"]
        live.until(lambda: not live.find_processes(f"{home}/"), lambda: f"the end of {live.find_processes(f'{home}/')}")
    finally:
        live.remove_folder(folder)


def test_scripts_of_the_repository():
    """tests/run would run this test again: what is named is there, and takes these arguments."""
    for path, line in STATEMENTS:
        words = line.split()
        if words[0] in ("tests/run", ".ci/run") or line.startswith("python3 tests/"):
            script, *arguments = words if words[0] != "python3" else words[1:]
            script = f"{script}/__main__.py" if (TOP / script).is_dir() else script
            assert (TOP / script).is_file() and (words[0] == "python3" or os.access(TOP / script, os.X_OK)), (path, line)
            files = [argument for argument in arguments if "/" in argument]
            assert all((TOP / argument).is_file() for argument in files), (path, line)
            checker = ["bash", "-n"] if words[0] != "python3" else [sys.executable, "-m", "py_compile"]
            subprocess.run([*checker, TOP / script], check=True)


def test_uninstall_names_what_there_is(tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, live.NEXUS, "install"], env=environ, capture_output=True)
    assert done.returncode == 0, done
    paths = re.findall(r"`(~?/[^`]+)`", TEXTS["docs/operations.md"].partition("\n## Uninstall\n")[2])
    named = [path.replace("~", str(tmp_path)) for path in paths]
    made = [os.path.join(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    assert len(made) >= 5 and any(path.endswith(".pyc") for path in made), "it is compiled"
    assert [path for path in made if not f"{path}/".startswith(tuple(f"{name}/" for name in named))] == []
    assert nexus.find_lease_folder(nexus.DISK, nexus.GpuConfig()) in named


# What a container needs of docker: its service starts them, stops them after a while, and passes on how they end.  The client
# lets a container have its signals, and goes on.
DOCKER = """
folder=${0%/bin/docker}/docker
case $1 in
  stop) kill -9 "$(cat "$folder/$4")"; while [ ! -e "$folder/$4.code" ]; do sleep 0.01; done;;
  run) trap : TERM INT HUP
    printf '%s\\n' "$@" > "$folder/words"
    echo "$4" > "$folder/fifo"
    while [ ! -e "$folder/$4.code" ]; do sleep 0.01; done
    exit "$(cat "$folder/$4.code")";;
esac
"""
DOCKERD = """
cd "$1"
while :; do
  read -r name < fifo
  (sleep 600 & echo $! > "$name.new"; mv "$name.new" "$name"; wait $!; echo $? > "$name.new"; mv "$name.new" "$name.code") &
done
"""


def test_a_container_ends_with_its_job():
    """However the job ends, and with its exit code; without the script it outlives its client."""
    script = next(text for _, kind, text in BLOCKS if kind == "bash" and find_tester(text) == "test_a_container_ends_with_its_job")
    with live.Box(gpus=2, kill_grace_seconds=6) as box:
        folder = box.path("docker")
        folder.mkdir()
        os.mkfifo(folder / "fifo")
        make_program(box.bin / "docker", DOCKER)
        (box.folder / "in_docker.sh").write_text(script)
        service = subprocess.Popen(["sh", "-c", DOCKERD, "dockerd", str(folder)], start_new_session=True, env={"PATH": os.environ["PATH"]})

        def start(command):
            job_id = box.nexus("add", "--cwd", str(box.folder), command).stdout.strip()
            path = folder / f"nexus-{job_id}"
            live.until(path.exists, f"the container of {job_id}")
            return job_id, int(path.read_text())

        try:
            job_id, container = start("in_docker.sh")
            words = (folder / "words").read_text().splitlines()
            assert words[words.index("--gpus") + 1] == '"device=0,1"' and f"{box.folder}:/work" in words
            live.kill(container)
            assert box.wait(job_id, "failed")["exit_code"] == 137
            job_id, container = start("in_docker.sh")
            box.nexus("kill", job_id)
            assert not live.is_alive(container) and box.wait(job_id)["cause"] == "killed"
            job_id, container = start("in_docker.sh")
            box.nexus("edit", job_id, "--timeout", "0.1s")
            assert box.wait(job_id, "failed")["cause"] == "timeout" and not live.is_alive(container)
            job_id, container = start("docker run --rm --name nexus-$NEXUS_JOB_ID my-image")
            box.nexus("kill", job_id)
            assert live.is_alive(container)
        finally:
            os.killpg(service.pid, 9)
            service.wait()


def test_nodes_are_added_as_it_says():
    block = next(text for _, kind, text in BLOCKS if kind == "bash" and text.startswith("nexus node add gpuuser"))
    front = {"is_behind_jump": False}
    with network.Net(nodes=[front, front, {}], jump=True) as net:
        head, names = net.head, {"gpuuser@10.0.0.5": net.nodes[0].target, "gpuuser@10.1.0.7": net.nodes[2].target,
                                 "me@gateway": net.jump.target, '"python train.py"': '"hostname; cat model"'}
        make_nexus(head.bin / "nexus", net.launch, head.python, f"{net.folder}/nexus.py")

        def run(line):
            done = subprocess.run([*head.machine.become(), "bash", "-ec", f"mkdir -p ~/exp; cd ~/exp; {line}"], env=head.environ,
                                  capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (line, done)
            return done.stdout
        git = "git -c user.name=ann -c user.email=ann@x"
        run(f"git init -q .; echo first > model; git add .; {git} commit -qm first; echo second > model")
        told = {}
        for line in list_calls(block):
            for name, ours in names.items():
                line = line.replace(name, ours)
            told[line.partition("#")[0].strip()] = run(line)
        assert [name for name in ("n1", "n2", "n3") if f"{name}: 2 GPUs" in "".join(told.values())] == ["n1", "n2", "n3"]
        [snapshot] = [answer.strip() for line, answer in told.items() if "--snapshot" in line]
        [bound] = [answer.strip() for line, answer in told.items() if "--node" in line]
        head.wait(snapshot, "completed")
        assert re.fullmatch(r"n[123]\nsecond\n", head.logs(snapshot))
        head.await_reason(bound, "the directory ", " does not exist on n1")
        live.until(lambda: "GPU n1:0 (Mock GPU, 24GB): Available\nGPU n1:1 (Mock GPU, 24GB): Available" in run("nexus"))


# Python

@pytest.mark.smoke
@pytest.mark.parametrize("path, text", list_blocks("python"))
def test_python(path, text):
    with live.Box(gpus=1, is_starting="Client" in text) as box:
        done = subprocess.run([sys.executable, "-c", text], env=box.environ, text=True, capture_output=True, timeout=60,
                              cwd=live.NEXUS.parent)
        assert (done.returncode, done.stdout) == (0, "completed 42\n\n" if "Client" in text else ""), done.stderr


# Pictures of the terminal, as nexus draws them of such a status

def make_told(**facts):
    """An object of the API; all else is null, in a copy too."""
    return {**dict.fromkeys([*nexus.JOB, *nexus.GPU, "is_paused", "gpu_trouble", "slurm", "hint", "label"]), **facts}


def make_status(**facts):
    return make_told(**{"queued_jobs": 3, "completed_jobs": 25, "failed_jobs": 0, "cancelled_jobs": 0,
                        "running_jobs": [], "gpu_status": [], "nodes": [], "hints": [], **facts})


def make_running(**facts):
    return make_told(**{"id": "abc", "command": "python train.py --lr 3e-4", "gpus": 1, "runtime_seconds": 2.25 * 3600,
                        "started_at": "2024-10-24T15:30:00Z", **facts})


def draw_the_readme():
    rows = [make_told(index=index, place=str(index), name="RTX 3090", memory_total="24GB", job_ids=[], is_available=index == 0)
            for index in range(3)]
    rows[1].update(job_ids=["abc"])
    rows[2].update(used_by="bob (pid 4242 python, 16GB)")
    return nexus.format_snapshot(make_status(running_jobs=[make_running()], gpu_status=rows), nexus.Paint(""))


def draw_slurm():
    job = make_running(command="python train.py", slurm_id="123", node="n1")
    slurm = {"handed_jobs": 1, "running_jobs": 1, "cluster": "mycluster", "trouble": None, "partitions": [
        {"name": "gpu", "state": "up", "is_default": True, "time_limit": "2-00:00:00", "gpus": 16, "gpus_used": 11}]}
    return nexus.format_snapshot(make_status(queued_jobs=1, running_jobs=[job], slurm=slurm), nexus.Paint(""))


def test_the_three_commands_of_snakemake(tmp_path):
    """Submit, status and cancel as its plugin calls them: the first with a script behind it, the last without a shell."""
    block = next(text for _, kind, text in BLOCKS if kind == "bash" and text.startswith("cat > nexus-status"))
    profile, = (text for _, kind, text in BLOCKS if kind == "yaml")
    submit, status, cancel = (re.search(f"cluster-generic-{name}-cmd: (.*)", profile)[1] for name in ("submit", "status", "cancel"))
    with live.Box() as box:
        make_nexus(box.bin / "nexus", forks.listen(box.folder / "forks"))
        subprocess.run(["sh", "-e", "-c", block], cwd=box.bin, check=True)
        scripts = {"good": f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", "bad": "exit 3", "long": "sleep 600", "waits": "true"}

        def call(command, **options):
            return subprocess.run(command, env=box.environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, **options)

        ids = {}
        for name, script in scripts.items():
            make_program(tmp_path / f"{name}.sh", script)
            line = submit.replace("{resources.gpus}", "0" if name == "bad" else "1").replace("{rule}", "train")
            ids[name] = call(f'{line} "{tmp_path}/{name}.sh"', shell=True).stdout.strip()

        def tell(name):
            return call(f"{status} '{ids[name]}'", shell=True).stdout

        box.wait(ids["bad"], "failed")
        assert [tell(name) for name in ids] == ["running\n", "failed\n", "running\n", "running\n"]
        assert not call([cancel, ids["long"], ids["waits"]]).returncode
        (tmp_path / "go").touch()
        box.wait(ids["good"], "completed")
        assert [tell(name) for name in ids] == ["success\n", "failed\n", "failed\n", "failed\n"]
        assert call(f"{status} zzz", shell=True).returncode == 3, "nothing is told of what there is not"


def test_the_picture_of_the_readme():
    [picture] = re.findall(r"^    \$ nexus\n((?:    .*\n|\n)+?)(?=\S)", TEXTS["README.md"], re.MULTILINE)
    assert re.sub("^    ", "", picture, flags=re.MULTILINE).rstrip() == draw_the_readme().rstrip()
    assert re.findall("^    .*", PROSE["README.md"], re.MULTILINE) == [line for line in f"    $ nexus\n{picture}".splitlines() if line]


@pytest.mark.parametrize("path, text", list_blocks("text"))
def test_pictures(path, text):
    if path == "docs/design.md":
        assert {name.lower() for name in re.findall(r"[A-Z]{6,}|STORE", text)} <= build.FOLDERS.keys()
    else:
        assert (path, text) == ("docs/slurm.md", draw_slurm())


# docs/design.md

def test_the_rooms_in_the_design():
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*) \|$", TEXTS["docs/design.md"], re.MULTILINE)
    assert {folder: rooms.replace("`", "").replace(",", "") for folder, rooms in rows} == {
        folder: names for folder, names in build.FOLDERS.items() if folder}
    for folder, rooms in rows:
        for room in re.findall(r"\w+", rooms):
            assert (TOP / "src" / folder / f"{room}.py").is_file(), room


def test_names_in_the_design():
    spans = [span for path, span in SPANS if path == "docs/design.md"]
    for span in spans:
        if re.fullmatch(r"src/[\w/]*|src/[\w/]+\.\w+", span):
            assert (TOP / span).exists(), span
        if re.fullmatch(r"\w+/\w+", span) and span.split("/")[0] in build.FOLDERS:
            assert span in build.ROOMS, span
        named = re.fullmatch(r"(tests/[\w/]+\.py)(?:::(\w+))?", span)
        if named:
            assert (TOP / named[1]).is_file() and f"def {named[2] or ''}" in (TOP / named[1]).read_text(), span
    source = live.NEXUS.read_text()
    for span in spans:
        if re.fullmatch(r"[A-Za-z_.]+\(\)|[A-Z][A-Za-z]+[a-z]|[A-Z_]{5,}", span) and span != "cmd_NAME()":
            owner, _, name = span.replace("()", "").rpartition(".")
            assert not owner or hasattr(getattr(nexus, owner), name) or f"self.{name}" in source, span
            assert owner or hasattr(nexus, name) or re.search(
                rf"^(    (def {name}\(|{name}\b)|(const|function|async function) {name}\b)", source, re.MULTILINE), span
    marks = re.findall(r"`(\w+)`[:,] ", PROSE["docs/design.md"].partition("\n2. Choose its marks.")[2].partition("\n3. ")[0])
    assert marks == ["asked", "kept", "public", "live", "live_in_slurm", "for_gpus", "form", "hidden", "repeats", "slurm", "unit", "label",
                     "line", "setting", "also", "of_group"]
    assert [mark for mark in marks if not hasattr(nexus.Field, mark)] == []


def test_names_in_the_design_stand_where_it_says():
    """Of `NAME` of `path/file.py`, and of `NAME` (`path/file.py`), the file has that name."""
    text = PROSE["docs/design.md"]
    named = re.findall(r"`([^`]+)`\s+(?:\(|of\s+|in\s+)`((?:src|tests|values)/[^`]+)`", text)
    for name, path in named:
        found = TOP / (path if "." in path else f"src/{path}.py")
        assert re.search(rf"^(    )?(class |def |function )?{name.removesuffix('()')}\b", found.read_text(), re.MULTILINE), (name, path)
    assert len(named) >= 12


def test_each_word_of_code_in_the_design_is_one():
    """A name that is nowhere in nexus or its tests is one that went."""
    paths = [TOP / "build.py", *(path for folder in ("src", "tests") for path in (TOP / folder).rglob("*"))]
    words = {word for path in paths if path.is_file() and path.suffix in (".py", ".sh", ".js") and "node_modules" not in path.parts
             for word in re.findall(r"\w+", path.read_text())}
    for path, span in SPANS:
        name = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", span)
        if path == "docs/design.md" and name and not (TOP / span).exists():
            assert name[1].rpartition(".")[2] in words, span


def test_the_sample_is_the_one_that_nexus_prints():
    assert (TOP / "config.toml.example").read_text() == nexus.format_sample_config()


def test_pip_installs_it(tmp_path):
    """Into a folder of its own, from what a wheel of these files holds.  nexus.py is cut short: a build reads it several times."""
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / name, tmp_path)
    [version] = re.findall("^__version__ = .*$", live.NEXUS.read_text(), re.MULTILINE)
    (tmp_path / "nexus.py").write_text(f"{version}\n\ndef {nexus.entry.__name__}():\n    print(f'nexus {{__version__}}')\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path / "made", "."], check=True, cwd=tmp_path)
    [wheel] = (tmp_path / "made").iterdir()
    assert wheel.name == f"nexus_gpu_queue-{nexus.__version__}-py3-none-any.whl"
    subprocess.run([*pip, "install", "--no-deps", "--prefix", tmp_path / "here", wheel], check=True)
    [packages] = (tmp_path / "here").glob("lib/python*/site-packages")
    told = subprocess.run([tmp_path / "here" / "bin" / "nexus"], env={**os.environ, "PYTHONPATH": str(packages)},
                          capture_output=True, text=True).stdout
    assert told == f"nexus {nexus.__version__}\n"

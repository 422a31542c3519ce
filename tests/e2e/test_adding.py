"""nexus add: what it takes, what it refuses, what it notes and prints.  Data on stdout, words on stderr."""

import os
import subprocess
import sys

import pytest
from console import COMMAND, SCRIPT, add, add_and_wait

import nexus


def test_add_prints_the_id_alone(home):
    done = home.main("add", "--gpus", "0", "echo a")
    assert nexus.is_job_id(done.out.strip()) and done.out.count("\n") == 1 and done.err == "" and done.code == 0
    assert home.main("add", "--gpus", "0", "--json", "echo a").json.keys() == {"id"}


def test_a_job_has_the_environment_directory_and_umask_of_its_submitter(home):
    folder = os.path.join(home.top, "a folder with 'quotes'")
    os.makedirs(folder, exist_ok=True)
    script = (f'umask 027; exec "{sys.executable}" "{COMMAND}" run --gpus 0 '
              '\'pwd; echo "$OWN"; umask; echo "$LD_LIBRARY_PATH"\'')
    done = subprocess.run(["bash", "-c", script], capture_output=True, cwd=folder, timeout=60, env={
        **home.environ, "OWN": "two\nlines 'and' \"quotes\" $HOME", "LD_LIBRARY_PATH": "/opt/lib"})
    assert done.stdout.decode().splitlines() == [folder, "two", "lines 'and' \"quotes\" $HOME", "0027", "/opt/lib"], done


WORDS = [  # what is typed, the command
    (["echo a b"], "echo a b"),
    (["echo", "a b", "$HOME"], "echo 'a b' '$HOME'"),
    (["--", "python", "train.py", "--lr", "0.1"], "python train.py --lr 0.1"),
    (["echo a; echo b | cat"], "echo a; echo b | cat"),
    (["echo 'größe 数据 🚀'"], "echo 'größe 数据 🚀'"),
]


@pytest.mark.parametrize("words, command", WORDS, ids=[case[1] for case in WORDS])
def test_how_words_become_a_command(home, words, command):
    assert home.job(home.main("add", "--gpus", "0", *words).id)["command"] == command


def test_options_arrive(home):
    words = ("--group", "g1", "--max-concurrent", "3", "--retries", "2", "--timeout", "2h", "--expect", "30m", "--gpu-mem", "1G",
        "--gpus", "0.5",
             "--gpu-ids", "0-1", "--priority", "low", "--cuda-arg", "--name", "n")
    home.main("pause")
    try:
        job = home.job(add(home, "true --cuda x", *words))
    finally:
        home.main("resume")
    wanted = {"group": "g1", "retries": 2, "timeout_seconds": 7200, "expected_time": 1800, "gpu_mem_mib": 1024, "gpus": 0.5,
        "gpu_ids": [0, 1],
              "priority": 2, "cuda_arg": True, "name": "n"}
    assert {name: job[name] for name in wanted} == wanted


def test_unique_is_told(home):
    first = add(home, "echo the only one")
    done = home.main("add", "--gpus", "0", "--unique", "echo the only one")
    assert done.id == first and f"job {first} is the same and is there already" in done.err
    assert home.main("add", "--gpus", "0", "--unique", "--json", "echo the only one").json == {"id": first, "known": [first]}
    assert home.main("add", "--gpus", "0", "--unique", "--env", "A=1", "echo the only one").id != first


BAD_ADDS = [  # reason, words, what it says
    ("nothing", [], "no command"),
    ("NUL", ["a\0b"], "NUL"),
    ("1 MB", ["x" * 2**20], "put it into a script"),
    ("options of the command", ["python", "train.py", "--lr", "1"], "'python train.py --lr 1'"),
    ("no number", ["--gpus", "many", "true"], "--gpus/-g must be"),
    ("too many", ["--gpus", "3", "true"], "3 GPUs"),
    ("too many named", ["--gpus", "2", "--gpu-ids", "1", "true"], "gpu_ids"),
    ("not there", ["--gpu-ids", "7", "true"], "7"),
    ("backwards", ["--gpu-ids", "3-1", "true"], "0-3,5"),
    ("no priority", ["--priority", "urgent", "true"], "urgent"),
    ("no variable", ["--env", "A", "true"], "NAME=VALUE"),
    ("no directory", ["--cwd", "/no/such/folder", "true"], "/no/such/folder"),
    ("a file and a command", ["--file", "x", "true"], "not both"),
    ("no file", ["--file", "/no/such/file"], "/no/such/file"),
    ("an endless file", ["--file", "/dev/zero"], "/dev/zero: it is longer than 64MB"),
    ("a script", ["--file", SCRIPT], "hint: nexus add job.sh"),
    ("an unknown option", ["--gpu", "1", "true"], "--gpu"),
    ("three decimals", ["--gpus", "0.125", "true"], "two decimals"),
    ("no size", ["--gpu-mem", "much", "true"], "--gpu-mem"),
    ("more memory than there is", ["--gpu-mem", "9999G", "true"], "with 9999GB"),
    ("a group of two lines", ["--group", "a\nb", "true"], "--group"),
    ("a limit of no group", ["--max-concurrent", "2", "true"], "--group NAME"),
    ("after no id", ["--after", ",", "true"], "--after"),
    ("half a retry", ["--retries", "1.5", "true"], "--retries"),
    ("no time", ["--timeout", "soon", "true"], "--timeout"),
    ("a model without a table", ["--llm", "qwen", "true"], "llm"),
    ("a sweep without a name", ["--sweep", "1,2", "t"], "NAME=VALUE"),
    ("a sweep of another name", ["--sweep", "lr=1", "t {rl}"], "no {lr}"),
    ("a sweep of a variable", ["--sweep", "lr=1", "t ${lr}"], "no {lr}"),
    ("brackets that do not match", ["--sweep", "l=[1,2", "t {l}"], "character 1"),
    ("a sweep of no file", ["--sweep", "s=@/no/such", "t {s}"], "@@/no/such"),
    ("a sweep of directories, one of which is missing", ["--sweep", "d=/,/no/such", "--cwd", "{d}", "t"], "/no/such"),
    ("a limit of no group in a sweep", ["--sweep", "a=1", "--max-concurrent", "2", "t {a}"], "--group NAME"),
    ("too many combinations", ["--sweep", "a=1..1000", "--sweep", "b=1..1000", "t {a} {b}"], "combinations"),
    ("no git tree", ["--snapshot", "--cwd", "/", "true"], "git"),
]


@pytest.mark.parametrize("reason, words, says", BAD_ADDS, ids=[case[0] for case in BAD_ADDS])
def test_what_add_refuses(home, reason, words, says):
    home.main("status")
    before = len(home.client().jobs())
    for command in ("add", "run"):
        done = home.main(command, *words)
        assert (done.code, done.out) == (2, "") and says in done.err and "\nhint: " in done.err, done
        assert done.err.startswith("nexus: ") and "Traceback" not in done.err and len(done.err) < 1000
    assert len(home.client().jobs()) == before


def test_a_snapshot_for_another_machine_is_refused(home):
    home.main("status")
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": home.file("token").read_text().strip()}
    for words in (["add"], ["add", "--dry-run"], ["run", "--dry-run"]):
        done = home.main(*words, "--snapshot", "true", **there)
        assert (done.code, done.out) == (2, "") and "work tree on the service's own machine" in done.err, done


@pytest.mark.parametrize("words, piped, says", [
    (["add"], b"echo 1", "nexus add --file -"), (["add", "-"], b"", "nexus add --file -"),
    (["add", "-n", "5", "true"], b"", "would be taken for a GPU")])
def test_what_could_not_be_meant_is_refused(home, words, piped, says):
    done = home.run(*words, stdin=piped)
    assert done.code == 2 and says in done.err and not done.out, done


@pytest.mark.parametrize("by", ["file", "stdin"])
def test_add_a_file_of_commands(home, by):
    content = b"\xef\xbb\xbf# first\r\n\n  echo a  \r\necho caf\xe9\necho b \\\n  > log"
    path = os.path.join(home.top, "commands.txt")
    with open(path, "wb") as file:
        file.write(content)
    done = home.run("add", "--gpus", "0", "--file", path if by == "file" else "-", stdin=content if by == "stdin" else b"")
    assert [home.client().job(job_id)["command"] for job_id in done.out.split("\n")[:-1]] == ["echo a", "echo caf\udce9", "echo b   > log"]


@pytest.mark.parametrize("content, says", [
    (b"# a\n\n", "no command"), (b"# a\n\necho \0\n", "line 3, 'echo "), (b"echo a\n" + b"x" * 200000, "line 2, 'xxx"),
    (b"echo a \\\n  b\necho \0\n", "line 3, 'echo "),
    (b"#!/bin/sh\necho a\n", "nexus add "),
    (b"echo a\necho 'b\n", "line 2, 'echo 'b': bash cannot read the command"), ("echo a\r\n".encode("utf-16"), "line 1, ")])
@pytest.mark.parametrize("by", ["file", "stdin"])
def test_nothing_of_a_bad_file_is_added(home, content, says, by):
    home.main("status")
    before, path = len(home.client().jobs()), home.file("commands.txt")
    path.write_bytes(content)
    done = home.run("add", "--gpus", "0", "--file", str(path) if by == "file" else "-", stdin=content if by == "stdin" else b"")
    assert done.code == 2 and done.out == "" and says in done.err and "hint:" in done.err, done
    assert len(home.client().jobs()) == before


def test_odd_commands_run_and_show_as_one_harmless_line(home):
    odd = {"echo one\necho two\n": b"one\ntwo\n", "printf 'a\x1b[2Jb'": b"a\x1b[2Jb", "echo caf\udce9": b"caf\xe9\n",
           "echo '" + "y" * 100000 + "'": b"y" * 100000 + b"\n", "echo \\\n  joined": b"joined\n"}
    for command, output in odd.items():
        job_id = add_and_wait(home, command, "--name", "odd")
        done = home.run("logs", job_id)
        assert (done.code, done.bytes) == (0, output)
        for words in (["jobs"], ["show", job_id], ["history", "-n", "0"]):
            shown = home.main(*words)
            assert shown.code == 0 and "\x1b" not in shown.out and "Traceback" not in shown.err
        assert home.job(job_id)["command"] == command
    lines = [line for line in home.run("jobs").out.split("\n") if "  odd  " in line]
    assert len(lines) == len(odd)


def test_a_job_after_several_ids(home):
    home.main("pause")
    ids = home.main("add", "--sweep", "n=0..1", "echo {n}").out
    job_id = home.main("add", "--after", ids, "echo done").id
    assert home.job(job_id)["after"] == ids.split()
    first, second = ids.split()
    job_id = home.main("add", "--after", second, "--after", f"{first},{second}", "--after-any", first, "echo done").id
    assert home.job(job_id)["after"] == [second, first] and home.job(job_id)["after_any"] == [first]
    assert "after " + ", ".join(ids.split()) in home.main("edit", job_id, "--after", first, "--after", second).err
    assert home.job(job_id)["after"] == ids.split()
    assert home.main("edit", job_id, "--after", "none").code == 0 and home.job(job_id)["after"] == []
    done = home.main("edit", job_id, "--gpus", "x")
    assert "nexus: --gpus/-g must be a number" in done.err, "its name, as add says it"


def test_what_comes_after_a_group_is_typed_as_the_rest(home):
    """With add, its --file, a script's options, edit, and completion; --after is for jobs."""
    home.main("pause")
    for name in ("g", "h, i"):
        add(home, "true", "--group", name)
    several = ("--after-group", "g", "--after-group", "h, i", "--after-group", "g", "--after-any-group", "g")
    home.file("list").write_text("echo 1\necho 2\n")
    home.file("job.sh").write_text("#!/bin/bash\n#NEXUS --after-group g --after-any-group 'h, i'\ntrue\n")
    made = [home.main("add", *several, "true").id, *home.main("add", *several, "--file", str(home.file("list"))).out.split()]
    assert [(home.job(id)["after_group"], home.job(id)["after_any_group"]) for id in made] == [(["g", "h, i"], ["g"])] * 3
    script = home.job(home.main("add", str(home.file("job.sh"))).id)
    assert (script["after_group"], script["after_any_group"]) == (["g"], ["h, i"])
    done = home.main("edit", made[0], "--after-group", "none", "--after-any-group", "h, i")
    assert done.code == 0 and "is changed: after group none, after any group h, i" in done.err, done
    assert (home.job(made[0])["after_group"], home.job(made[0])["after_any_group"]) == ([], ["h, i"])
    for words, code, says in ((["add", "--after", "g", "true"], 3, "after all of it: --after-group g"),
                              (["add", "--after-any-group", "k", "true"], 3, "there is no job of group 'k'"),
                              (["add", "--group", "g", "--after-group", "g", "true"], 4, "the job would wait for itself"),
                              (["edit", made[0], "--group", "h, i"], 4, f"job {made[0]} would wait for itself")):
        done = home.main(*words)
        assert done.code == code and says in done.err, (words, done)
    assert home.main("complete", "add", "--after-group", "").out == "g\n", "bash would take a name with blanks apart"


def test_dry_run(home):
    before = len(home.client().jobs())
    for command in ("add", "run"):
        done = home.main(command, "--dry-run", "--gpus", "0.5", "echo one")
        assert (done.code, done.out) == (0, "echo one\n") and "1 job would be added" in done.err
    done = home.main("add", "--dry-run", "--sweep", "lr=1e-3,1e-4", "--sweep", "seed=0..1",
        'a --lr {lr} --seed {seed} ${HOME} ${lr} \'{"x": {y}}\'')
    rest = '${HOME} ${lr} \'{"x": {y}}\''
    assert done.out.splitlines() == [f"a --lr {lr} --seed {seed} {rest}" for lr in ("1e-3", "1e-4")
        for seed in "01"] and "4 jobs" in done.err
    done = home.main("add", "--dry-run", "--json", "--gpus", "0", "x")
    assert done.json[0].items() >= {"command": "x", "gpus": 0, "priority": 1}.items()
    assert home.main("add", "--dry-run", "--gpus", "9", "x").code == 2 and home.main("add", "--dry-run", "--after", "zzz", "x").code == 3
    assert len(home.client().jobs()) == before


def test_a_dry_run_leaves_out_what_would_not_be_added_or_would_not_run(home):
    first, failed = add_and_wait(home, "echo 1"), add_and_wait(home, "false")
    words = ("add", "--dry-run", "--gpus", "0")
    done = home.main(*words, "--unique", "--sweep", "n=1,2,2", "echo {n}")
    assert done.out == "echo 2\n" and f"job {first} is the same and is there already" in done.err and "1 job would be added" in done.err
    done = home.main(*words, "--after", failed, "echo 3")
    assert (done.code, done.out) == (0, "") and "0 jobs would be added" in done.err
    assert f"it would be cancelled at once: {home.job(add_and_wait(home, 'true', '--after', failed))['cause_line']}" in done.err


def test_a_sweep_of_a_file(home):
    home.file("swept").write_text("echo {a}\n# not {a}\necho {a}{a}\n")
    done = home.main("add", "--gpus", "0", "--sweep", "a=1,2", "--file", str(home.file("swept")))
    ids = done.out.split()
    assert [home.job(job_id)["command"] for job_id in ids] == ["echo 1", "echo 2", "echo 11", "echo 22"]
    assert home.main("run", "--sweep", "a=1,2", "echo {a}").code == 2 and home.main("run", "--gpus", "0", "--sweep", "a=7",
        "echo {a}").out == "7\n"
    assert len(home.main("add", "--gpus", "0", "--sweep", "a=7", "echo {a}").out.split()) == 1


def test_a_sweep_fills_names_groups_variables_and_directories(home, tmp_path):
    for folder in ("a,b", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dirs.txt").write_text("a,b\n\nc\n")
    done = home.main("add", "--gpus", "0", "--sweep", f"d=@{tmp_path}/dirs.txt", "--sweep", "k=['x,y',{z}]",
        "--name", "run-{d}", "--group", "g-{k}", "--env", "SEED=s{k}", "--env", "SAME=yes", "--cwd", str(tmp_path / "{d}"),
        "echo {k} ${SEED} $SAME {d} ${#d} {lr}; pwd")
    assert done.err == "nexus: {lr} stays as it is, as no --sweep has that name\n"
    jobs = [home.job(job_id) for job_id in done.out.split()]
    assert [(job["name"], job["group"], job["cwd"]) for job in jobs] == [
        (f"run-{folder}", "g-[x,y,{z}]", str(tmp_path / folder)) for folder in ("a,b", "c")]
    assert jobs[0]["command"] == "echo ['x,y',{z}] ${SEED} $SAME a,b ${#d} {lr}; pwd", "quotes stay in the command, in one pass"
    home.main("wait", jobs[0]["id"])
    assert home.main("logs", jobs[0]["id"]).out == f"[x,y,{{z}}] s[x,y,{{z}}] yes a,b 0 {{lr}}\n{tmp_path}/a,b\n"
    assert not {"variables", "env"}.intersection(jobs[0])


def test_a_script_has_the_values_of_its_sweep_and_jobs_that_it_adds_do_not(home, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\necho $NEXUS_TASK_ID $NEXUS_SWEEP_s $NEXUS_SWEEP_lr; echo $SEED\n"
                      f"{sys.executable} {COMMAND} add --gpus 0 'env | grep -c ^NEXUS_[ST][WA]; echo in $SEED' "
                      "> inner.$NEXUS_TASK_ID\n")
    words = ("--gpus", "0", "--sweep", "s=8..9", "--sweep", "lr=0.1,'a,b'", "--env", "SEED={s}", "--cwd", str(tmp_path))
    ids = home.main("add", *words, str(script)).out.split()
    assert home.main("wait", *ids).code == 0
    assert [home.main("logs", job_id).out for job_id in ids] == [
        "0 8 0.1\n8\n", "1 8 a,b\n8\n", "2 9 0.1\n9\n", "3 9 a,b\n9\n"]
    inner = (tmp_path / "inner.3").read_text().strip()
    home.main("wait", inner)
    assert home.main("logs", inner).out == "0\nin 9\n"
    assert home.main("add", "--unique", *words, str(script)).out.split() == ids, "each has variables of its own"
    again = home.main("retry", ids[3]).out.strip()
    home.main("wait", again)
    assert home.main("logs", again).out == "3 9 a,b\n9\n"
    held = home.main("add", "--gpus", "0", "--begin", "+1h", "--sweep", "s=8", "--env", "SEED={s}", "echo $SEED").id
    home.main("edit", held, "--env", "SEED=5", "--begin", "none")
    home.main("wait", held)
    assert home.main("logs", held).out == "5\n", "a later --env counts"


def test_each_over_http_says_what_differs(home):
    added = home.client().submit({"gpus": 0, "group": "g", "env": {"A": "1", "B": "1"}, "each": [
        {"command": "echo $A$B", "name": "x"}, {"command": "echo $A$B", "group": "h", "env": {"A": "2"}}]})["ids"]
    assert home.main("wait", *added).code == 0
    assert [home.main("logs", job_id).out for job_id in added] == ["11\n", "21\n"]
    assert [(home.job(job_id)["name"], home.job(job_id)["group"]) for job_id in added] == [("x", "g"), (None, "h")]
    for body in ({"each": [{"name": "x"}]}, {"each": []}, {"command": "x", "each": [{"command": "x"}]},
                 {"each": [{"command": "x", "gpus": 1}]}, {"each": [{"command": "x", "env": {"A": "x" * 70000}}]}):
        with pytest.raises(nexus.NexusError) as caught:
            home.client().submit(body)
        assert caught.value.kind == "usage", body


NOTED = [  # reason, command, what is said of it
    ("GPUs of its own", "CUDA_VISIBLE_DEVICES=1 true", "--gpu-ids 3 asks for GPU 3"),
    ("conda of a terminal", "conda activate ml; python -c 1", "a job has none: leave it out, and say --conda ml"),
    ("after a cd", "cd / && micromamba activate /opt/ml&& true", "--conda /opt/ml"),
    ("conda as scripts use it", ". /opt/conda/etc/profile.d/conda.sh; conda activate ml", ""),
    ("a shell", "bash", "bash waits for what is typed: at a terminal, nexus run --tty bash is an interactive job; nexus attach ID"),
    ("with options", "/bin/bash -l", "nexus run --tty '/bin/bash -l'"), ("an interpreter", "python3", "nexus run --tty python3"),
    ("an editor", "vim a b", "nexus run --tty 'vim a b'"), ("a shell with work", "bash job", ""), ("a module", "python3 -m x", ""),
    ("a command in a shell", "bash -c true", ""), ("a version", "python3 -V", ""), ("a script of vim's", "vim -es x", ""),
    ("conda's hook", 'eval "$(conda shell.bash hook)" && conda activate ml', ""), ("nothing", "true", ""),
]


@pytest.mark.parametrize("reason, command, says", NOTED, ids=[case[0] for case in NOTED])
def test_what_will_not_do_what_was_meant_is_noted_when_it_is_added(home, reason, command, says):
    done = home.main("add", "--gpus", "0", "--begin", "+1h", command)
    assert (says in done.err if says else not done.err) and home.main("cancel", done.id).code == 0


def test_a_script_that_needs_slurm_is_noted(home, tmp_path):
    script = tmp_path / "job.sh"
    for line, says in (("srun python train.py", "it calls srun"), ("  exec srun -n 4 x", "it calls srun"), ("echo srun", ""),
                       ("mkdir out.$SLURM_JOB_ID", "it reads $SLURM_JOB_ID"), ("echo ${SLURM_PROCID:-0}", "it reads $SLURM_PROCID"),
                       ("echo $SLURM_ARRAY_TASK_ID", "")):
        script.write_text(f"#!/bin/bash\n{line}\n")
        done = home.main("add", "--gpus", "0", "--begin", "+1h", str(script))
        assert (f"{script}: {says}" in done.err if says else not done.err), line
        home.main("cancel", done.id)


def test_a_notebook_is_run_by_jupyter(home, tmp_path):
    (tmp_path / "nb.ipynb").write_text("{}")
    done = home.main("add", "--cwd", str(tmp_path), "nb.ipynb")
    assert done.code == 2 and "hint: nexus add 'jupyter nbconvert --to notebook --execute --inplace nb.ipynb'" in done.err


@pytest.mark.parametrize("words, hint", [
    (["train.py"], "nexus add 'python train.py'"), (["train.py --lr 3"], "nexus add 'python train.py --lr 3'"),
    (["train.py", "--lr", "3"], "'train.py --lr 3'"), (["job.sh"], "nexus add 'bash job.sh'"), (["cmds.txt"], "nexus add --file cmds.txt"),
    (["tool 1"], "nexus add './tool 1'")])
def test_a_file_is_no_command(home, tmp_path, words, hint):
    for name in ("train.py", "job.sh", "cmds.txt", "tool"):
        (tmp_path / name).write_text("")
    (tmp_path / "tool").chmod(0o755)
    done = home.main("add", "--cwd", str(tmp_path), *words)
    assert done.code == 2 and hint in done.err, done


@pytest.mark.parametrize("words, hint", [
    (["python3", "train.py", "-n", "5"], "nexus add 'python3 train.py -n 5'"),
    (["-g", "0", "--name=x", "python3", "train.py", "--gpus", "2"], "nexus add -g 0 --name=x 'python3 train.py --gpus 2'")])
def test_options_after_the_first_word_are_nobodys(home, words, hint):
    """Without quotes they could be the command's."""
    done = home.main("add", *words)
    assert done.code == 2 and f"hint: {hint}\n" in done.err, done
    for fine in (["--dry-run", "echo", "x"], ["echo x", "--gpus", "0", "--dry-run"], ["--dry-run", "--", "echo", "-n", "x"]):
        assert home.main("add", *fine).code == 0, fine


def test_a_program_is_no_command_of_nexus(home):
    done = home.main("python3", "train.py")
    assert done.code == 2 and "hint: to queue it: nexus add 'python3 train.py'\n" in done.err


def test_a_script_that_is_not_there_is_noted(home, tmp_path):
    home.main("pause")
    for command, is_noted in (("typo.sh", True), ("./typo", True), ("typo.sh 1", False), ("true", False)):
        done = home.main("add", "--cwd", str(tmp_path), command)
        assert done.code == 0 and (f"there is no file {command} yet" in done.err) == is_noted, done


def test_a_file_that_is_piped_in_is_no_input(home):
    path = os.path.join(home.top, "data")
    with open(path, "w") as file:
        file.write("1\n")
    with open(path) as file:
        done = subprocess.run([sys.executable, COMMAND, "add", "--dry-run", "cat -"], stdin=file, capture_output=True, text=True,
                              env=home.with_changes({}))
    assert done.returncode == 0 and "does not reach the job" in done.stderr, done

"""Scripts that say themselves what they need: #NEXUS and #SBATCH lines."""

import pytest
from console import Home


@pytest.fixture(scope="module")
def home():
    """Nothing starts in it."""
    with Home(is_quick=True, cpu_slots=20) as made:
        made.main("pause")
        yield made


@pytest.fixture
def folder(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, lines, name="job.sh", first="#!/bin/bash"):
    (folder / name).write_text("\n".join([first, *lines, "echo done", "#NEXUS --gpus 99", ""]))


def add(home, *words):
    """The jobs that were added, and what was said of their script."""
    done = home.main("add", *words)
    assert done.code == 0, done
    return [home.job(job_id) for job_id in done.out.split()], done.err.replace("nexus: it waits: the queue is paused (nexus resume)\n", "")


NEXUS, SBATCH = "#NEXUS ", "#SBATCH "
OPTIONS = [  # lines, words before the script, what the job has
    (["# a comment", "", NEXUS + "--gpus 2 --timeout 2h", NEXUS + "--name 'a b'  # why"], [],
     {"gpus": 2, "timeout_seconds": 7200, "name": "a b", "command": "/bin/bash job.sh x 'y z'"}),
    ([NEXUS + "--gpus 2 --retries 1"], ["--gpus", "1", "--retries", "0"], {"gpus": 1, "retries": 0}),
    ([NEXUS + "--gpus 2", SBATCH + "--gpus 1"], [], {"gpus": 2}),
    ([SBATCH + "--job-name=sl --gres=gpu:2 --time=30"], [], {"name": "sl", "gpus": 2, "timeout_seconds": 1800}),
    ([SBATCH + "-J sl -G 2", SBATCH + "-t1-12 -Dsub"], [], {"name": "sl", "gpus": 2, "timeout_seconds": 129600}),
    ([SBATCH + "--gres=gpu:mock:2"], [], {"gpus": 2, "gpu_type": "mock"}),
    ([SBATCH + "-t 5 --signal=B:USR1@120"], [], {"warn": "USR1@120s"}), ([SBATCH + "-t 5 --signal=SIGINT"], [], {"warn": "INT@60s"}),
    ([SBATCH + "--hold --gpus=2"], [], {"is_held": True, "gpus": 2}), ([SBATCH + "-H"], [], {"is_held": True}),
    ([SBATCH + "--gpus=2"], ["--hold"], {"is_held": True}),
    ([SBATCH + "--gpus=mock"], [], {"gpus": 1, "gpu_type": "mock"}),
    ([SBATCH + "--gpus-per-node 2 --time=2:00:00"], [], {"gpus": 2, "timeout_seconds": 7200}),
    ([SBATCH + "--gres=nvme:1,gpu --time=10:30"], [], {"gpus": 1, "timeout_seconds": 630}),
    ([SBATCH + "--gres=nvme:9 --time=1-2:03:04"], [], {"gpus": 1, "timeout_seconds": 93784}),
    ([SBATCH + "--begin=now+1hour --time=0"], [], {"timeout_seconds": 0}),
    (["##SBATCH --gpus=2", "# SBATCH --gpus=2"], [], {"gpus": 1}),
]


@pytest.mark.parametrize("lines, words, has", OPTIONS)
def test_the_options_of_a_script(home, folder, lines, words, has):
    (folder / "sub").mkdir()
    write(folder, lines)
    (job,), _ = add(home, *words, "job.sh", "x", "y z")
    assert {name: job[name] for name in has} == has
    if "-Dsub" in lines[-1]:
        assert job["cwd"] == str(folder / "sub") and job["command"] == f"/bin/bash {folder}/job.sh x 'y z'"
    if "--begin" in lines[-1]:
        assert job["begin_at"]


def test_an_array_is_a_sweep_in_a_group(home, folder):
    write(folder, [SBATCH + "--array=0-1,4-8:4%2 -J sl", SBATCH + "-p gpu --mem=16G --output out", SBATCH + "--mem 1 --nice"])
    jobs, said = add(home, "job.sh")
    assert [job["command"] for job in jobs] == [f"SLURM_ARRAY_TASK_ID={task} /bin/bash job.sh" for task in (0, 1, 4, 8)]
    assert {job["group"] for job in jobs} == {"sl"} and jobs[-1]["name"] == "sl task=8"
    assert said == "nexus: job.sh: nexus does without --partition, --mem, --output (nexus logs ID), --nice\n"


def test_dependencies_of_slurm(home, folder):
    first, second = (add(home, "true")[0][0]["id"] for _ in range(2))
    write(folder, [SBATCH + f"--dependency=afterok:{first}:{second},afterany:{first}"])
    (job,), _ = add(home, "job.sh")
    assert job["after"] == [first, second] and job["after_any"] == [first]


@pytest.mark.parametrize("line, says", [
    (NEXUS + "--gpu 2", "job.sh, line 3: unrecognized arguments: --gpu"), (NEXUS + "--gpus many", "job.sh, line 3: --gpus"),
    (NEXUS + "gpus 2", "job.sh, line 3: gpus is not an option"), (NEXUS + "--name 'x", "job.sh, line 3: No closing quotation"),
    (SBATCH + "--time=soon", "job.sh, line 3: --time=soon cannot be read"), (SBATCH + "--gpus=", "job.sh, line 3: --gpus= cannot be read"),
    (SBATCH + "--dependency=singleton", "job.sh, line 3: --dependency=singleton cannot be read"),
    (SBATCH + "--array=1-2-3", "job.sh, line 3: --array=1-2-3 cannot be read"),
    (SBATCH + "--array=3%0", "job.sh, line 3: --array=3%0 cannot be read"),
    (SBATCH + "--array=0-1000000000", "the sweep has more than 10000"),
    (NEXUS + "--file x", "job.sh, line 3: --file is not an option of a script"),
    (SBATCH + "x", "job.sh, line 3: x is")])
def test_what_a_line_has_wrong_is_said(home, folder, line, says):
    write(folder, ["# fine", line])
    done = home.main("add", "job.sh")
    assert done.code == 2 and f"nexus: {says}" in done.err and done.out == "", done


@pytest.mark.parametrize("line, mark", [
    ("#PBS -l select=1:ngpus=2", "#PBS"), ("#BSUB -gpu num=2", "#BSUB"), ("#$ -l gpu=2", "#$"), ("#HQ --resource gpus=2", "#HQ"),
    ("# GFLOW --gpus=2", "# GFLOW"), ("#flux: -g 2", "#flux:"), ("#PJM -L node=1", "#PJM"), ("#MSUB -l gpus=1", "#MSUB"),
    ("#OAR -l gpu=2", "#OAR"), ("#COBALT -n 1", "#COBALT"),
    ("#$HOME is read", ""), ("#$ is money", ""), ("# PBS -l is not used here", ""), ("##PBS -l ngpus=2", ""), ("echo\n#PBS -l ngpus=2", ""),
    ("#PBS -l ngpus=2\n#SBATCH --gpus=2", ""), ("#NEXUS --gpus 1\n# GFLOW --gpus=1", "")])
def test_lines_of_another_scheduler_are_not_passed_over_in_silence(home, folder, line, mark):
    write(folder, ["# what it does", "", line])
    says = f"nexus: job.sh: nexus does not read {mark} lines; give it what they ask for as options, like --gpus 2" if mark else ""
    for words in (["job.sh"], ["bash job.sh"]):
        said = add(home, *words)[1]
        assert said.startswith(says) and said.count("\n") <= 1 and ("does not read" in said) == bool(mark), said


def test_what_is_a_script_and_how_it_runs(home, folder):
    write(folder, [], "train.py", "#!/usr/bin/env python3")
    write(folder, [NEXUS + "--gpus 2"], "plain", "# no interpreter")
    write(folder, [NEXUS + "--gpus 2"], "able.sh")
    (folder / "able.sh").chmod(0o755)
    (folder / "bytes").write_bytes(b"#!/bin/sh\n\0")
    write(folder, [NEXUS + "--gpus 2"], "true")
    for words, command, gpus in (
            (["train.py"], "python3 train.py", 1), (["plain"], "bash plain", 2), (["able.sh"], "/bin/bash able.sh", 2),
            (["./able.sh 1"], "./able.sh 1", 2), (["true"], "true", 1),
            (["--cwd", "/", "able.sh"], f"{folder}/able.sh", 2), (["--cwd", str(folder), "plain"], "bash plain", 2)):
        (job,), said = add(home, *words)
        assert (job["command"], job["gpus"], said) == (command, gpus, ""), words
    assert home.main("add", "bytes").code == 2
    assert f"{folder} is a directory, and no command" in home.main("add", str(folder)).err
    for line, better in (("bash able.sh", "nexus add able.sh"), ("bash able.sh --lr 1", "nexus add 'able.sh --lr 1'")):
        assert better in add(home, line)[1], "its options are not read"
    there = {"NEXUS_URL": f"http://127.0.0.1:{home.port}", "NEXUS_TOKEN": home.file("token").read_text().strip()}
    done = home.main("add", "./able.sh", **there)
    assert "options in ./able.sh are not read over" in done.err and home.job(done.id)["command"] == "./able.sh", done


def test_the_variables_of_export_are_set(home, folder):
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --gpus=0 --export=ALL,SEED=4,A=b\n#SBATCH --export=ALL\necho $SEED $A\n")
    home.main("resume")
    done = [home.run("run", *words, "job.sh", cwd=folder) for words in ([], ["--env", "SEED=5"])]
    home.main("pause")
    assert [each.out for each in done] == ["4 b\n", "5 b\n"] and "without --export (--env)" in done[0].err, done


def test_sbatch_and_run_take_scripts(home, folder):
    write(folder, [NEXUS + "--gpus 0"])
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --gpus=0 --array=3\necho task $SLURM_ARRAY_TASK_ID $1\n")
    home.main("resume")
    done = home.run("run", "job.sh", "x", cwd=folder)
    home.main("pause")
    assert done.code == 0 and done.out == "task 3 x\n", done
    assert home.run("sbatch", "job.sh", cwd=folder).id

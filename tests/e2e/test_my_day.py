"""The guide's section "My day": what stands there is typed, and does what the text says."""

import contextlib
import csv
import os
import re
import subprocess

import live
from test_readme import TEXTS, make_program

MY_DAY = TEXTS["docs/guide.md"].partition("\n## My day\n")[2].partition("\n## ")[0]
SECTIONS = dict(part.split("\n", 1) for part in MY_DAY.split("\n### ")[1:])
# What the jobs run, and what there is on a machine
PROGRAMS = {
    "python": 'case $1 in prep.py) test -e mended;; train.py) [ -z "$NEEDS_TORCH" ] || { '
              "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1; };; esac",
    "jupyter": "echo http://127.0.0.1:8888/lab?token=abc; exec sleep 600", "tensorboard": "exec sleep 600",
    "crontab": 'case $1 in -l) cat ~/crontab.txt;; *) cat > ~/new.txt; mv ~/new.txt ~/crontab.txt;; esac', "rsync": 'mkdir -p "$HOME/exp"',
    "ssh": 'shift; exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$*"'}


class Day(live.Box):
    """A machine on which ann has installed nexus: her home is the folder of the box."""

    def __init__(self):
        super().__init__(name=".nexus")
        (self.folder / "exp").mkdir()
        (self.folder / "crontab.txt").touch()
        self.local = self.folder / ".local/bin"
        self.local.mkdir(parents=True)
        (self.folder / ".local/share/nexus").mkdir(parents=True)
        make_program(self.local / "nexus", f'NEXUS_HOME=~/.nexus exec {self.python} {live.COMMAND} "$@"')
        for name, text in PROGRAMS.items():
            make_program(self.bin / name, text)
        make_program(self.local / "python", 'exec true')            # of `ssh`, which has a bare PATH
        self.environ["PATH"] = f"{self.bin}:{self.local}:{os.environ['PATH']}"

    def type(self, text, folder="", **environ):
        done = subprocess.run(["bash", "-e", "-c", text], env={**self.environ, **environ}, cwd=self.folder / folder, capture_output=True,
                              text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (text, done)
        return done

    def end_of(self, name, status="completed"):
        return self.wait(self.ask("GET", f"/jobs/{name}")["id"], status)


@contextlib.contextmanager
def day_of(section):
    """(a box, the blocks of this section)"""
    with Day() as box:
        yield box, re.findall("^```bash\n(.*?)^```$", SECTIONS[section], re.MULTILINE | re.DOTALL)


def test_each_section_has_a_test():
    assert {*SECTIONS} == {"Every night", "A notebook and TensorBoard", "A deadline", "A chain that breaks", "The wrong environment",
                           "From another machine", "A month's cleaning", "Leaving"}


def test_every_night():
    """The line is run as cron runs it: without directory, venv or PATH."""
    with day_of("Every night") as (box, [block]):
        make_program_of_venv(box, "echo trained")
        box.type(block)
        line = (box.folder / "crontab.txt").read_text().strip()
        command = re.fullmatch(r"0 22 \* \* \* (.*)", line)[1]
        box.ask("POST", "/service/pause")
        for night in range(3):
            subprocess.run(["/bin/sh", "-c", command], env={"HOME": str(box.folder), "PATH": "/usr/bin:/bin"}, cwd="/", check=True)
            if night:
                box.ask("POST", "/service/resume")
                box.end_of("nightly")
        assert box.type("nexus logs nightly").stdout == "trained\n"
        assert len(box.ask("GET", "/jobs?name=nightly")) == 2, "the first one still waited in the second night"


def make_program_of_venv(box, text):
    venv = box.folder / "exp/.venv/bin"
    venv.mkdir(parents=True)
    make_program(venv / "python", text)
    (venv / "activate").write_text('VIRTUAL_ENV=$PWD/.venv; PATH=$VIRTUAL_ENV/bin:$PATH; export PATH VIRTUAL_ENV\n')


def test_a_notebook_and_a_board():
    with day_of("A notebook and TensorBoard") as (box, [block]):
        *adding, reading = block.splitlines()
        box.type("\n".join(adding))
        for name in ("notebook", "board"):
            box.wait(box.ask("GET", f"/jobs/{name}")["id"], "running")
        live.until(lambda: "lab?token=abc" in box.type(reading).stdout)
        assert "nexus cancel notebook board" in SECTIONS["A notebook and TensorBoard"]
        box.type("nexus cancel notebook board")
        assert {job["status"] for job in box.ask("GET", "/jobs")} == {"cancelled"}


def test_a_deadline():
    with day_of("A deadline") as (box, [block]):
        ids = box.type('nexus add --group exp1 --sweep s=1..4 "sleep 600 {s}"').stdout.split()
        for job_id in ids[:2]:
            box.wait(job_id, "running")
        box.type(block)
        jobs = box.ask("GET", "/jobs?group=exp1")
        assert box.ask("GET", "/jobs/final")["status"] == "completed" and len(jobs) == 6, "two of the sweep run again"
        assert [job["status"] for job in jobs if job["id"] in ids] == ["cancelled"] * 2 + ["running"] * 2


def test_a_chain_that_breaks():
    with day_of("A chain that breaks") as (box, [adding, again]):
        box.type(adding, "exp")
        assert [box.end_of(name, status)["cause"] for name, status in (("prep", "failed"), ("train", "cancelled"))] == [
            "exit", "dependency"]
        (box.folder / "exp/mended").touch()
        ids = box.type(again, "exp").stdout.split()
        assert [box.wait(job_id, "completed")["name"] for job_id in ids] == ["prep", "train", "report"]


def test_the_wrong_environment():
    with day_of("The wrong environment") as (box, [block]):
        make_program_of_venv(box, "exit 0")
        ids = box.type('nexus add --sweep s=1..7 --gpus 0.25 "python train.py {s}"', "exp", NEEDS_TORCH="1").stdout.split()
        assert {box.wait(job_id, "failed")["cause_line"] for job_id in ids} == {"ModuleNotFoundError: No module named 'torch'"}
        again = box.type(block, "exp").stdout.split()
        assert len(again) == 7 and {box.wait(job_id)["status"] for job_id in again} == {"completed"}


def test_from_another_machine():
    with day_of("From another machine") as (box, [block]):
        done = box.type(block.replace("python train.py", "echo trained"))
        assert done.stdout.endswith("\ntrained\n") and box.end_of("far")["cwd"] == str(box.folder / "exp")


def test_a_months_cleaning():
    with day_of("A month's cleaning") as (box, [block]):
        box.type('nexus wait "$(nexus add --group g true)"')
        box.type(block)
        assert [row["group"] for row in csv.DictReader((box.folder / "usage.csv").open())] == ["g"]
        assert len(box.ask("GET", "/jobs")) == 1, "it is not old enough"


def test_leaving():
    with day_of("Leaving") as (box, [block]):
        box.type("echo '1 1 * * * other' > crontab.txt; echo '0 22 * * * nexus add x' >> crontab.txt")
        box.type('nexus wait "$(nexus add "echo done")"; nexus add "sleep 600"')
        box.type(block)
        assert (box.folder / "crontab.txt").read_text() == "1 1 * * * other\n"
        assert len((box.folder / "jobs.csv").read_text().splitlines()) == 3
        left = subprocess.run(["tar", "tzf", box.folder / "nexus-logs.tgz"], capture_output=True, text=True, check=True).stdout
        assert left.count("stdout.log") == 2 and not (box.folder / ".nexus").exists() and not (box.local / "nexus").exists()
        live.until(lambda: not live.find_processes(f"{box.folder}/.nexus"), "the end of all that was nexus")

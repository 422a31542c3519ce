"""The folder of a job's logs: what is nexus's own there is removed, and what links lead to stays."""

import contextlib
import os
import pathlib

import pytest

import nexus

DISK = nexus.Disk()


# Log folders

OWN = ("stdout.log", "stderr.log", "job.sh", "job.sh.77.tmp", "attempt-1", "attempt-12", "claim-77", "result-1.json",
       "fault-1", "slurm-1.log")
MADE = ("work/model.pt", "files/out/loss.txt", "core.77", "stdout.log.bak", "my job.sh")


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def test_of_a_job_all_that_is_nexus_own_is_removed(tmp_path):
    fill(tmp_path, *(f"job_abc/{name}" for name in OWN), "job_abcd/stdout.log")
    for _ in range(2):                          # the second time nothing is there
        nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
        assert os.listdir(tmp_path) == ["job_abcd"]


def test_what_a_job_made_is_never_removed(tmp_path):
    fill(tmp_path / "job_abc", *OWN, *MADE)
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "job_abc") == sorted(MADE)


@pytest.mark.parametrize("made", [(), ("work/a",)])
def test_a_script_that_came_with_a_job_is_nexus_own(tmp_path, made):
    fill(tmp_path / "job_abc", "stdout.log", "work/main.py", *made)
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "job_abc") == list(made) and (tmp_path / "job_abc").exists() == bool(made)


def test_a_link_in_place_of_the_script_s_folder(tmp_path):
    fill(tmp_path / "project", "main.py")
    fill(tmp_path / "job_abc", "stdout.log")
    (tmp_path / "job_abc/work").symlink_to(tmp_path / "project")
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "project") == ["main.py"]


def test_what_links_point_to_stays(tmp_path):
    outside = tmp_path / "data"
    fill(outside, "weights.pt")
    fill(tmp_path / "logs/job_abc", "stdout.log")
    os.symlink(outside, tmp_path / "logs/job_abc/stderr.log")
    os.symlink(outside / "weights.pt", tmp_path / "logs/job_abc/attempt-1")
    os.symlink("/nowhere", tmp_path / "logs/job_abc/job.sh")
    nexus.remove_job_files(DISK, str(tmp_path / "logs"), str(tmp_path / "logs/job_abc"))
    assert not (tmp_path / "logs/job_abc").exists() and files_of(outside) == ["weights.pt"]


# What a job may put in the place of a file or a folder of nexus's.  {} is a folder of the user's, with files of the same names.

IN_THE_WAY = [  # reason, how it comes to be in a job's folder, in the place of `name`
    ("a link", lambda folder, name, other: (folder / name).symlink_to(other / name)),
    ("a link to nothing yet", lambda folder, name, other: (folder / name).symlink_to(other / "new")),
    ("a FIFO", lambda folder, name, other: os.mkfifo(folder / name)),
    ("a device without end", lambda folder, name, other: (folder / name).symlink_to("/dev/zero")),
    ("a folder", lambda folder, name, other: fill(folder, f"{name}/made")),
    ("the job's folder is a link", lambda folder, name, other: (folder.rename(folder.parent / "away"), folder.symlink_to(other))),
    ("and there is nothing yet", lambda folder, name, other: (
        folder.rename(folder.parent / "away"), folder.symlink_to(other), (other / name).unlink(missing_ok=True))),
]
WRITERS = [  # reason, the file, what writes it or removes it
    ("output that a node has sent", "stdout.log", lambda folder: nexus.append_log(DISK, f"{folder}/stdout.log", b"out", 0)),
    ("how the logs grew", "log.times", lambda folder: nexus.append_log_mark(DISK, folder, "1 2 3\n")),
    ("a claim", "attempt-2", lambda folder: nexus.take_claim(DISK, folder, "abc-1-2")),
    ("the way is cleared for a log", "stderr.log", lambda folder: clear(folder)),
    ("for a claim", "attempt-2", lambda folder: clear(folder)), ("for a result", "result-2.json", lambda folder: clear(folder)),
    ("for what conda says", "fault-2", lambda folder: clear(folder)), ("for Slurm's", "slurm-2.log", lambda folder: clear(folder)),
    ("all goes", "stdout.log", lambda folder: nexus.remove_job_files(DISK, os.path.dirname(folder), folder)),
]


def clear(folder):
    """As before a further attempt; then all that it opens is a file, or is not there."""
    nexus.make_job_folder(DISK, folder)
    nexus.clear_way(DISK, folder, 2)
    for name in ("stdout.log", "stderr.log", "attempt-2", "result-2.json", "fault-2", "slurm-2.log"):
        path = pathlib.Path(folder, name)
        assert not path.is_symlink() and (path.is_file() or not path.exists())


@pytest.mark.parametrize("reason, name, act", WRITERS, ids=[case[0] for case in WRITERS])
@pytest.mark.parametrize("way, put", IN_THE_WAY, ids=[case[0] for case in IN_THE_WAY])
def test_nothing_of_a_job_leads_elsewhere(tmp_path, reason, name, act, way, put):
    folder, other = tmp_path / "logs/job_abc", tmp_path / "mine"
    fill(folder, "job.sh")
    fill(other, *OWN, "log.times", "attempt-2", "result-2.json", "fault-2", "slurm-2.log", "work/main.py")
    put(folder, name, other)
    before = {path: path.read_text() for path in other.rglob("*") if path.is_file()}
    with contextlib.suppress(nexus.NexusError):         # a folder that is a link is left
        act(str(folder))
    assert {path: path.read_text() for path in other.rglob("*") if path.is_file()} == before
    if way == "a folder":
        assert len(list(folder.parent.rglob("made"))) == 1, "it is the job's"


NOT_REMOVED = [  # reason, log_dir, folder, below a root that holds logs/job_abc, data/, link -> logs/job_abc, job_lnk -> data
    ("not below log_dir", "logs", "data"), ("deeper than log_dir", ".", "logs/job_abc"), ("another name", "logs", "logs/abc"),
    ("by a way round", "logs", "logs/../logs/job_abc"), ("a link", "logs", "logs/job_lnk"), ("a file", "logs", "logs/job_file"),
    ("nothing", "logs", "logs/job_none"), ("no name", "logs", ""),
]


@pytest.mark.parametrize("reason, log_dir, folder", NOT_REMOVED, ids=[case[0] for case in NOT_REMOVED])
def test_no_other_folder_is_touched(tmp_path, reason, log_dir, folder):
    for name in ("logs/job_abc", "logs/abc", "data"):
        fill(tmp_path / name, "stdout.log")
    os.symlink(tmp_path / "data", tmp_path / "logs" / "job_lnk")
    (tmp_path / "logs" / "job_file").write_text("a file")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(nexus.NexusError) if reason != "nothing" else contextlib.nullcontext():
        nexus.remove_job_files(DISK, os.path.normpath(tmp_path / log_dir), f"{tmp_path}/{folder}" if folder else "")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before

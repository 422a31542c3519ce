"""The services of several users agree on GPUs."""

import contextlib
import os
import pathlib
import resource
import shutil
import socket
import subprocess

import pytest

import nexus


def uuid(index):
    return f"GPU-{index:08x}-0000-0000-0000-{index:012x}"


# Leases

OWN_NAME = nexus.find_user(os.geteuid())

ALL = ["GPU-1", "GPU-2", "GPU-3", "GPU-4"]


def test_two_services_do_not_have_one_gpu(leases):
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    one.take("abc", ["GPU-1", "GPU-2"])
    with pytest.raises(nexus.NexusError) as caught:
        two.take("xyz", ["GPU-3", "GPU-2"])
    assert caught.value.kind == "conflict" and caught.value.message == f"the nexus of {OWN_NAME} took GPU-2 first"
    assert not two.held and one.find_holders(ALL) == {}, "all or none"
    two.take("xyz", ["GPU-3"])
    assert one.find_holders(ALL) == {"GPU-3": OWN_NAME} and set(two.find_holders(ALL)) == {"GPU-1", "GPU-2"}
    one.close_own("abc")
    assert two.find_holders(ALL) == {}
    two.take("uvw", ["GPU-1"])


def test_the_jobs_of_one_service_may_share(leases):
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    for job_id in ("abc", "xyz"):
        one.take(job_id, ["GPU-1"])
    one.close_own("abc")
    assert one.find_holders(ALL) == {} and set(two.find_holders(ALL)) == {"GPU-1"}

REMOVALS = [  # reason, how it is done
    ("the file", lambda folder: os.unlink(os.path.join(folder, "GPU-1"))),
    ("the folder", shutil.rmtree),
    ("the folder, and somebody makes another", lambda folder: (shutil.rmtree(folder), os.mkdir(folder), os.chmod(folder, 0o1777))),
    ("another is moved over the file", lambda folder: (
        pathlib.Path(folder, "x").touch(), os.chmod(f"{folder}/x", 0o666), os.rename(f"{folder}/x", f"{folder}/GPU-1"))),
    ("the file is moved elsewhere", lambda folder: os.rename(f"{folder}/GPU-1", f"{folder}/y")),
    ("another service has looked at the new one", lambda folder: (
        os.unlink(f"{folder}/GPU-1"), nexus.Leases(nexus.DISK, folder, "0-cccccccc").find_holders(["GPU-1"]))),
]


@pytest.mark.parametrize("reason, remove", REMOVALS, ids=[case[0] for case in REMOVALS])
def test_a_lease_that_was_removed_is_locked_again(leases, reason, remove):
    """By the service, for a job whose runner has a lock that nobody else meets any more; however often it is removed."""
    one, two, runner = leases("0-aaaaaaaa"), leases("0-bbbbbbbb"), leases("0-aaaaaaaa")
    runner.take("abc", ["GPU-1"])
    for _ in range(2):
        assert one.find_holders(ALL, ["GPU-1"]) == {} and not one.lost, "it is locked"
        remove(leases.folder)
        assert one.find_holders(ALL, ["GPU-1"]) == {} and one.lost == ["GPU-1"] and len(one.kept) == 1
        assert two.find_holders(ALL) == {"GPU-1": OWN_NAME}
        with pytest.raises(nexus.NexusError, match="took GPU-1 first"):
            two.take("xyz", ["GPU-1"])
    one.drop("GPU-1")                                   # as when this service is killed; the next one finds it
    assert one.find_holders(ALL, ["GPU-1"]) == {} and two.find_holders(ALL) == {"GPU-1": OWN_NAME}
    one.drop("GPU-1")
    two.take("xyz", ["GPU-1"])
    assert one.find_holders(ALL, ["GPU-1"]) == {"GPU-1": OWN_NAME} and not one.kept, "who was first has it"


def test_a_lease_that_cannot_be_written_as_on_a_full_disk_is_none(leases):
    one, limits = leases(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(nexus.NexusError, match="File too large") as caught:
            one.take("abc", ["GPU-1", "GPU-2"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.kind == "unavailable" and not one.held and leases("0-bbbbbbbb").find_holders(ALL) == {}


def test_its_files_can_be_used_by_all_whatever_the_umask(leases):
    before = os.umask(0o077)
    try:
        leases().take("abc", ["GPU-1", "MIG-GPU-1/2/0"])
    finally:
        os.umask(before)
    modes = {path: os.stat(os.path.join(leases.folder, path)).st_mode & 0o7777 for path in ("", *os.listdir(leases.folder))}
    assert modes == {"": 0o1777, "GPU-1": 0o666, "MIG-GPU-1_2_0": 0o666}

PLANTED = [  # reason, how it is made in the place of a GPU's file
    ("a FIFO", os.mkfifo), ("a link to a file", lambda path: os.symlink("GPU-2", path)),
    ("a link to nothing", lambda path: os.symlink("/nowhere", path)), ("a folder", os.mkdir),
    ("a socket", lambda path: socket.socket(socket.AF_UNIX).bind(path)),
    ("a second name of another file", lambda path: (pathlib.Path(path + ".x").touch(), os.link(path + ".x", path))),
]


@pytest.mark.parametrize("reason, plant", PLANTED, ids=[case[0] for case in PLANTED])
def test_what_somebody_puts_there_costs_that_gpu_alone(leases, reason, plant):
    """It is named, not opened, and not changed."""
    one, two = leases("0-aaaaaaaa"), leases("0-bbbbbbbb")
    two.take("xyz", ["GPU-2"])
    path = os.path.join(leases.folder, "GPU-1")
    plant(path)
    blocked = f"{OWN_NAME} (who put something else at {path})"
    assert one.find_holders(ALL) == {"GPU-1": blocked, "GPU-2": OWN_NAME}
    with pytest.raises(nexus.NexusError) as caught:
        one.take("abc", ["GPU-1"])
    assert caught.value.kind == "conflict" and blocked in caught.value.message
    one.take("abc", ["GPU-3"])
    assert pathlib.Path(leases.folder, "GPU-2").read_text() == f"0-bbbbbbbb {OWN_NAME}\n"


def test_no_file_outside_the_folder_is_touched(leases, tmp_path):
    """Whoever made a file may put a link in its place at any moment."""
    secret, one = tmp_path / "secret", leases()
    secret.write_text("mine")
    secret.chmod(0o600)
    os.utime(secret, (1, 1))

    def exchange():
        for name in os.listdir(one.folder) if os.path.isdir(one.folder) else ():
            os.unlink(f"{one.folder}/{name}")
            os.symlink(secret, f"{one.folder}/{name}")

    one.disk = nexus.Disk()
    for name in [name for name in vars(nexus.Disk) if not name.startswith("_")]:
        call = getattr(one.disk, name)
        setattr(one.disk, name, lambda *given, call=call, **named: exchange() or call(*given, **named))
    for _ in range(3):
        with contextlib.suppress(nexus.NexusError):
            one.take("abc", ["GPU-1"])
        with contextlib.suppress(nexus.NexusError):
            one.find_holders(ALL)
        one.close_own("abc")
    assert (secret.read_text(), secret.stat().st_mode & 0o777, secret.stat().st_mtime) == ("mine", 0o600, 1)

FOLDERS = [  # reason, how it is made, words
    ("a private folder that the owner named by mistake", lambda path: os.mkdir(path, 0o700), "chmod 1777"),
    ("a folder where one may remove another's files", lambda path: (os.mkdir(path), os.chmod(path, 0o777)), "chmod 1777"),
    ("a link to such a folder", lambda path: (os.mkdir(path + "2"), os.chmod(path + "2", 0o1777), os.symlink(path + "2", path)),
     "Not a directory"),
]


@pytest.mark.parametrize("reason, make, words", FOLDERS, ids=[case[0] for case in FOLDERS])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, reason, make, words):
    (tmp_path / "top").mkdir()
    folder = str(tmp_path / "top" / "nexus-leases")
    make(folder)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.Leases(nexus.DISK, folder, "0-aaaaaaaa").find_holders(ALL)
    assert caught.value.kind == "unavailable" and words in f"{caught.value.message} {caught.value.hint}"


def test_no_cleaner_finds_a_lease_old(leases):
    one = leases()
    one.take("abc", ["GPU-1"])
    path, handle, _ = one.paths("abc")[0]
    runner = subprocess.Popen(["flock", "-s", handle, "-c", "echo have; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert runner.stdout.readline() == b"have\n"
    one.close_own("abc")
    os.utime(path, (1, 1))
    leases("0-bbbbbbbb").find_holders(ALL)
    assert os.stat(path).st_mtime > 1000
    runner.communicate(b"\n")

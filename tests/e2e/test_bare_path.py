"""A service that was started with a bare PATH, as `ssh box nexus add` does."""

import json
import os
import pathlib
import shutil
import time

import live
import pytest

BARE = {"PATH": "/usr/bin:/bin"}


def make_path(box, *missing):
    """A PATH with all but these programs."""
    folder = box.path("all-but")
    folder.mkdir()
    for program in [*pathlib.Path("/usr/bin").iterdir(), *pathlib.Path("/bin").iterdir()]:
        if program.name not in missing and not (folder / program.name).is_symlink():
            (folder / program.name).symlink_to(program)
    return folder


def test_what_the_last_service_found_is_found_again():
    """nvidia-smi, and a screen that lies elsewhere."""
    with live.Box(gpus=[{"memory_total": 24000}], launcher="screen", is_starting=False) as box:
        programs = box.path("programs")
        programs.mkdir()
        shutil.copy(shutil.which("screen"), programs / "screen")
        hidden = make_path(box, "screen", "nvidia-smi")
        box.environ["PATH"] = str(hidden)
        done = box.nexus("run", "--gpus", "0", "true")
        assert done.returncode == 0 and "screen is not installed" in box.nexus().stdout, done
        assert "where nvidia-smi works, nexus restart" in box.nexus().stdout
        assert box.nexus("restart", environ={"PATH": f"{box.bin}:{programs}:{hidden}"}).returncode == 0
        box.await_gpu(0)
        assert json.loads(live.read(box.home / "programs.json"))["nvidia-smi"] == str(box.bin)
        for again in ("stop", "start"):
            assert box.nexus(again).returncode == 0
        box.await_gpu(0, is_available=True)
        assert box.wait_started(box.add("sleep 600"))["session"] and "nexus_job_" in box.nexus("screens").stdout
        assert box.nexus("run", "--gpus", "0", "echo $PATH").stdout == f"{hidden}\n", "a job's PATH is its submitter's"

        box.bin.chmod(0o777)                            # anybody could put another one there by now
        assert box.nexus("restart").returncode == 0
        live.until(lambda: "nvidia-smi was not found" in (box.status()["gpu_trouble"] or ""), "what is missing")


@pytest.mark.parametrize("folder", ["/opt/bin", "/usr/lib/wsl/lib", "/usr/local/nvidia/bin"])
def test_where_drivers_put_nvidia_smi(folder):
    """In a mount namespace of its own."""
    live.need_root()
    with live.Box(gpus=[{"memory_total": 24000}], is_starting=False, environ=BARE) as box:
        argv = box.argv
        shown = 'mkdir "$1/new" "$1/work" && mount -t tmpfs none "$1/work" && mkdir "$1/work/up" "$1/work/w" && mount -t overlay -o ' \
                '"lowerdir=$3,upperdir=$1/work/up,workdir=$1/work/w" none "$3" && mkdir -p "$2" && cp "$1/bin/nvidia-smi" "$2" && ' \
                'shift 3 && exec "$@"'
        top = {"/opt/bin": "/opt"}.get(folder, folder.rpartition("/")[0].rpartition("/")[0])
        box.argv = lambda *words: ["unshare", "-m", "--propagation", "private", "sh", "-c", shown, "sh", str(box.folder), folder, top,
                                   *argv(*words)]
        box.start()
        box.argv = argv
        box.await_gpu(0, is_available=True)


def test_a_job_without_bash_is_refused():
    with live.Box(gpus=1) as box:
        for verb in ("add", "run"):
            done = box.nexus(verb, "true", environ={"PATH": str(make_path(box, "bash")) if verb == "add" else str(box.path("all-but"))})
            assert done.returncode == 2 and "bash was not found on the job's PATH" in done.stderr, done
        assert box.health()["is_healthy"]


def test_a_service_without_bash_says_so():
    with live.Box(gpus=1, is_starting=False) as box:
        full, box.environ["PATH"] = os.environ["PATH"], str(make_path(box, "bash"))
        box.start()
        words = "bash was not found on the service's PATH"
        done = box.nexus("run", "true", environ={"PATH": full})
        assert done.returncode == 6 and words in done.stderr and "nexus restart" in done.stderr, done
        assert words in str(box.health()) and not box.health()["is_healthy"] and words in box.nexus().stdout
        assert box.nexus("restart", environ={"PATH": full}).returncode == 0
        assert box.nexus("run", "echo hello", environ={"PATH": full}).stdout == "hello\n"


def test_the_hint_follows_the_fault_of_screen():
    with live.Box(gpus=1, launcher="screen", is_starting=False) as box:
        box.path("screen").rmdir()
        box.path("screen").touch()
        (box.home / "screen").touch()
        assert box.nexus("run", "echo hello").stdout == "hello\n"
        assert "apt install screen" not in box.nexus().stdout and "jobs run directly" in box.nexus().stdout


def test_a_folder_of_path_that_hangs_freezes_nothing():
    """As of an sshfs whose server is gone.  It hangs while the service runs, and at its start."""
    with live.Box(gpus=1, launcher="screen", is_starting=False) as box:
        whole, hung = os.environ["PATH"], box.path("sshfs")
        hung.mkdir()
        box.environ["PATH"] = f"{hung}:{whole}"
        box.start()
        early = box.wait_started(box.add("sleep 600"))["id"]
        with live.hung_folder(hung):
            begin = time.monotonic()
            assert early in box.nexus().stdout
            assert box.wait(box.add("echo hello", gpus=0, env={"PATH": whole}), "completed")["exit_code"] == 0
            added = box.nexus("add", "--gpus", "0", "true")             # with this PATH: its runner waits for the folder
            assert added.returncode == 0, added
            late = box.wait_started(added.stdout.split()[-1])["id"]
            assert box.nexus("kill", early, late).returncode == 0
            box.wait(early, "cancelled")
            box.wait(late, "cancelled")
            live.until(lambda: any(f"{hung} does not answer" in str(check) for check in box.health()["checks"]), "what hangs")
            for verb in ("stop", "start"):
                done = box.nexus(verb)
                assert done.returncode == 0, done
            assert box.wait(box.add("echo hello", gpus=0, env={"PATH": whole}), "completed")["exit_code"] == 0
            assert box.nexus("add", "--gpus", "0", "--hold", "train.py").returncode == 0     # no such program: PATH is searched
            assert time.monotonic() - begin < 60, "each waits for the folder once"
        live.until(lambda: "does not answer" not in str(box.health()), "it answers again")
        assert box.nexus("stop").returncode == 0


def test_no_command_and_no_service_stays_where_no_signal_ends_who_waits():
    """As of an sshfs whose program runs, and whose server is gone: a process with a thread that waits there does not end."""
    with live.Box(gpus=1, is_starting=False) as box:
        whole, hung = os.environ["PATH"], box.path("sshfs")
        hung.mkdir()
        box.environ["PATH"] = f"{hung}:{whole}"
        with live.hung_folder(hung, is_taken=True):
            added = box.nexus("add", "--gpus", "0", "--env", f"PATH={whole}", "true")       # it starts the service
            assert added.returncode == 0, added
            assert box.wait(added.stdout.split()[-1], "completed")
            pid = live.find_service(box.home)
            assert box.nexus("stop").returncode == 0 and not live.is_alive(pid)

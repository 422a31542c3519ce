"""Two users' services on one machine, which agree through the leases alone."""

import contextlib
import os
import subprocess
import time

import live
import pytest
import shared

PROTECTED_REGULAR = "/proc/sys/fs/protected_regular"


@contextlib.contextmanager
def protected_regular():
    """Forbid to open another's file in a sticky folder with O_CREAT, as distributions do; as it was, afterwards."""
    before = live.read(PROTECTED_REGULAR).strip()
    with contextlib.suppress(OSError), open(PROTECTED_REGULAR, "w") as setting:      # it may be read-only, in a container
        setting.write("2")
    try:
        yield
    finally:
        with contextlib.suppress(OSError), open(PROTECTED_REGULAR, "w") as setting:
            setting.write(before)


@pytest.fixture(scope="module")
def services():
    """Two users' services with the same two GPUs and the same leases."""
    with protected_regular(), shared.services_of_two_users(gpus=[{}, {}]) as made:
        yield made


@pytest.fixture
def two(services):
    with services[0].lend() as ann, services[1].lend() as bob:
        ann.status()
        bob.status()
        yield ann, bob
    lease_folder(ann).chmod(0o1777)
    subprocess.run(["find", lease_folder(ann), "-mindepth", "1", "-delete"], check=True)


def lease_folder(box):
    return box.user.folder / "shared" / "leases"


def test_no_gpu_is_given_twice(two):
    """Many short jobs of both, on one GPU and on two; each writes down when it had which."""
    stamps = two[0].user.folder / "open" / "stamps"
    stamps.touch()
    stamps.chmod(0o666)
    command = (f'echo "begin $NEXUS_JOB_ID $NEXUS_GPU_ID $(date +%s%N)" >> {stamps}; sleep 0.05; '
               f'echo "end $NEXUS_JOB_ID $NEXUS_GPU_ID $(date +%s%N)" >> {stamps}')
    jobs = [(box, box.add(command, gpus=2 if number % 5 == 4 else 1)) for number in range(10) for box in two]
    for box, job_id in jobs:
        assert box.wait(job_id, "completed")["exit_code"] == 0
    begun, spans = {}, {}
    for line in stamps.read_text().splitlines():
        verb, job_id, gpus, at = line.split()
        if verb == "begin":
            assert job_id not in begun, "started twice"
            begun[job_id] = int(at)
        else:
            for gpu in gpus.split(","):
                spans.setdefault(gpu, []).append((begun[job_id], int(at), job_id))
    assert len(begun) == len(jobs) and set(spans) == {"0", "1"}
    for taken in spans.values():
        taken.sort()
        for (_, ended, first), (began, _, second) in zip(taken, taken[1:]):
            assert ended <= began, f"{first} and {second} had one GPU together"
    assert not [line for box in two for line in box.log().splitlines() if "Internal error" in line]


def test_what_a_crash_leaves_behind_blocks_nobody(two):
    ann, bob = two
    job = ann.wait_started(ann.add("sleep 600", gpus=2))
    files = list(lease_folder(ann).iterdir())
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o666 for file in files)
    waits = bob.add("true")
    bob.await_reason(waits, "held by the nexus of")
    live.until(lambda: live.kill(*ann.user.processes()) or not ann.user.processes(), "the end of all that is ann's")
    bob.wait(waits, "completed")
    # And ann, who comes back, finds what became of her job
    ann.start()
    assert ann.wait(job["id"], "failed")["cause"] == "session-lost"
    ann.wait(ann.add("true"), "completed")


def test_what_lives_on_keeps_its_gpu(two):
    """Her service, its supervisor and job.sh are dead, and the command goes on: it has the GPU."""
    ann, bob = two
    job = ann.wait_started(ann.add("sleep 601.25", gpus=2))
    command = live.until(lambda: [pid for pid in live.find_commands("sleep 601.25") if pid in live.descendants(job["pid"])])
    live.kill(*(pid for pid in ann.user.processes() if pid not in command))
    live.until(lambda: ann.user.processes() == command)
    waits = bob.add("true")
    assert bob.await_reason(waits, f"held by the nexus of {ann.user.name}")
    bob.await_probe()
    assert bob.job(waits)["status"] == "pending"
    live.kill(*command)
    bob.wait(waits, "completed")


def test_service_down_and_job_alive(two):
    """The lease is the runner's: it holds while no service of hers runs, and ends with the job."""
    ann, bob = two
    job = ann.wait_started(ann.add(f"while [ ! -e {ann.path('go')} ]; do sleep 0.05; done; exit 3", gpus=2))
    ann.kill_all_of_service()
    waits, words = bob.add("true"), f"held by the nexus of {ann.user.name}"
    bob.await_reason(waits, f"GPU 0 is {words}", f"GPU 1 is {words}")
    assert words in bob.await_gpu(0, is_available=False)["unavailable"]
    ann.path("go").touch()
    bob.wait(waits, "completed")
    ann.start()
    assert ann.wait(job["id"], "failed")["exit_code"] == 3


def test_a_strange_file_in_the_folder_disturbs_nobody(two):
    """It may even stand for another user's GPU: what somebody else has there can be neither removed nor replaced."""
    ann, bob = two
    job = ann.wait_started(ann.add("sleep 600"))
    folder = lease_folder(ann)
    file, = folder.glob(f"GPU-{job['gpu_index']:08}-*")
    os.chown(file, ann.user.uid, -1)                        # whose service looked first has made it
    done = subprocess.run([*bob.user.become(), "sh", "-c", f"rm -f {file}; mv {file} {folder}/x; cd {folder}; mkfifo pipe; mkdir folder; "
                           "ln -s /etc/passwd link; : > 'a b'; truncate -s 1T large"], capture_output=True, text=True)
    assert done.returncode == 0 and file.exists()
    assert bob.wait(bob.add("true"), "completed")["gpu_index"] == 1
    assert ann.wait(ann.add("true"), "completed")["gpu_index"] == 1


# What others put into the folder


def python_of(user, code, *words):
    """Run Python code as a user until it says so; it goes on until its standard input ends."""
    code += "\nprint('ready', flush=True)\ninput()"
    process = subprocess.Popen([*user.become(), user.python, "-I", "-c", code, *map(str, words)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def run_ten(box):
    """The seconds that ten short jobs take, one after the other."""
    began = time.monotonic()
    for job_id in [box.add("true", gpus=2) for _ in range(10)]:
        box.wait(job_id, "completed")
    return time.monotonic() - began


CROWD = """
import os, sys
folder, uuid = sys.argv[1:]
os.chdir(folder)
open("big", "w").write((uuid + " ") * 1600)
makers = [lambda path: os.symlink("big", path), lambda path: open(path, "w").write(uuid), os.mkfifo,
          lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40)]
for number in range(4000):
    makers[number % 4](f"GPU-{number:08x}")
"""


def test_thousands_of_files_delay_nobody(two):
    """Links to a large file, small files, FIFOs and endless files."""
    ann, bob = two
    alone_s = run_ten(ann)
    python_of(bob.user, CROWD, lease_folder(ann), ann.status()["gpu_status"][0]["uuid"]).communicate("\n")
    assert run_ten(ann) < 3 * alone_s + 20


def test_a_file_that_holds_up_whoever_opens_it(two):
    """Its owner has a write lease on it: an open waits for 45 s, unless it asks not to wait.  It costs this GPU alone."""
    ann, bob = two
    path = lease_folder(ann) / ann.status()["gpu_status"][0]["uuid"]
    aside = path.with_suffix(".new")                    # ann's service opens what has the name of a GPU
    holder = python_of(bob.user, "import fcntl, os, signal, sys\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\n"
                       "file = open(sys.argv[1], 'w'); file.flush()\n"
                       "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)", aside)
    aside.replace(path)
    waits = ann.add("true", gpus=2)
    assert ann.wait(ann.add("true"), "completed", timeout_s=40)["gpu_index"] == 1
    ann.await_reason(waits, f"{bob.user.name} (who put something else at {path})")
    holder.communicate("\n")


def test_a_gpus_file_that_somebody_keeps_locked(two):
    ann, bob = two
    ann.wait(ann.add("true", gpus=2), "completed")
    holder = python_of(bob.user, "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)",
                       lease_folder(ann) / ann.status()["gpu_status"][0]["uuid"])
    waits = ann.add("true", gpus=2)
    ann.await_reason(waits, "GPU 0 is held by the nexus of somebody (who keeps ")
    ann.wait(ann.add("true"), "completed")
    holder.communicate("\n")
    ann.wait(waits, "completed")


def test_a_folder_that_cannot_be_used_is_said(two):
    ann, _ = two
    ann.wait(ann.add("true"), "completed")
    lease_folder(ann).chmod(0o755)
    waits = ann.add("true")
    ann.await_reason(waits, str(lease_folder(ann)), "not a folder that all may write")
    status, health = ann.call("GET", "/health")
    assert status == 503 and "chmod 1777" in str([check for check in health["checks"] if not check["is_ok"]])
    lease_folder(ann).chmod(0o1777)
    ann.wait(waits, "completed")

"""Disks without room: of the state, of the logs, of all; and a home that takes no writes."""

import contextlib
import json
import re
import subprocess

import live
from console import Home
from test_survival import Load


@contextlib.contextmanager
def small_disk(path, options="size=2m"):
    """A real file system of 2 MB, mounted there."""
    live.need_root()
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "nexus-test", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], capture_output=True)


def fill(path):
    """Take all room that is there."""
    with open(path / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 1024)


def test_full_disk_for_the_state():
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=2, is_starting=False, is_supervised=False)
        stack.callback(box.close)
        disk = stack.enter_context(small_disk(box.folder / "disk"))
        stack.enter_context(box)
        box.write_config(state_file=str(disk / "state.json"))
        box.start()
        pid = box.pid()
        load = Load(box)
        for number in range(2):
            known, refused = len(load.ids), load.refused
            live.until(lambda known=known: len(load.ids) > known + 10, "some jobs")
            fill(disk)
            live.until(lambda refused=refused: load.refused > refused + 3, "refusals")
            status, answer = box.call("POST", "/queue", {"command": "true"})
            if status == 503:                           # a page that has room yet may take one more line
                assert answer["error"] == "unavailable" and "No space left" in answer["message"] and answer["hint"]
                live.until(lambda: any("No space left" in hint for hint in box.status()["hints"]) and not box.health()["is_healthy"])
            else:
                box.ask("GET", f"/jobs/{answer['id']}")
            if number == 1:                             # killed while it is full
                box.kill_service()
                box.start()
                pid = box.pid()
            (disk / "filler").unlink()
            known = len(load.ids)
            live.until(lambda known=known: len(load.ids) > known + 3, "it to go on by itself")
            assert box.pid() == pid
        load.stop.set()
        load.thread.join()
        extra = {job["id"] for job in box.ask("GET", "/jobs")} - {job_id for job_id, _ in load.ids}
        for job_id in extra:
            box.wait(job_id, "completed")
        load.check()
        assert "Internal error" not in box.log()


def test_full_disk_for_the_logs():
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=0, cpu_slots=20, launcher="screen", is_starting=False, is_supervised=False)
        stack.callback(box.close)
        disk = stack.enter_context(small_disk(box.folder / "disk"))
        stack.enter_context(box)
        box.write_config(log_dir=str(disk / "logs"))
        box.start()
        pid = box.pid()
        waiting = {}
        for code in (0, 5, 6):
            command = f"while [ ! -e {box.path(f'go{code}')} ]; do sleep 0.05; done; exit {code}"
            waiting[code] = box.wait_started(box.add(command, gpus=0))["id"]
        # A job that fills it with what it prints
        noisy = box.wait(box.add("head -c 5000000 /dev/zero", gpus=0), "failed")
        assert noisy["cause"] == "exit" and noisy["exit_code"] == 1 and "No space left on device" in noisy["cause_line"]
        fill(disk)
        # One that is to start now
        late = box.add("echo hello", gpus=0)
        live.until(lambda: re.search("No space left|cannot be written", box.job(late)["waiting_for"] or ""), "why it waits")
        # Those that end now
        box.path("go0").touch()
        box.path("go5").touch()
        assert box.wait(waiting[0], "completed")["exit_code"] == 0
        assert box.wait(waiting[5], "failed")["exit_code"] == 5
        live.until(lambda: not box.health()["is_healthy"], "a look at the disks")
        assert box.pid() == pid
        # And one that ends while the service is away too
        box.kill_all_of_service()
        box.path("go6").touch()
        live.until(lambda: not live.find_commands(f"{box.path('go6')}"), "its command's end")
        box.start()
        pid = box.pid()
        assert box.wait(waiting[6], "failed")["exit_code"] == 6
        (disk / "filler").unlink()
        for path in (disk / "logs").glob("*/stdout.log"):
            path.write_bytes(b"")
        assert box.wait(late, "completed") and box.pid() == pid
        live.until(lambda: (disk / "logs" / f"job_{waiting[6]}" / "result-1.json").exists(), "the results that were not written")
        assert "Internal error" not in box.log()


@contextlib.contextmanager
def small_home(options="size=6m", **settings):
    """A box whose home is a small disk of its own."""
    with contextlib.ExitStack() as stack:
        box = live.Box(gpus=2, is_starting=False, **settings)
        stack.callback(box.close)
        config = live.read(box.home / "config.toml")
        stack.enter_context(small_disk(box.home, options))
        stack.enter_context(box)
        (box.home / "config.toml").write_text(config)
        yield box


UNRECORDED = "it has ended with {}, to be recorded when there is room"


def test_home_on_a_full_disk():
    """Killed while its whole home is full, it comes back, shows all, and goes on when there is room."""
    with small_home(launcher="screen") as box:
        box.start()
        ran, go = box.path("ran"), box.path("go")
        ids = {code: box.wait_started(box.add(f"echo {code} >> {ran}; while [ ! -e {go} ]; do sleep 0.05; done; exit {code}"))["id"]
               for code in (0, 5)}
        after = [box.add(f"echo after >> {ran}", after=[ids[0]])]
        waiter = subprocess.Popen(box.argv("wait", ids[0]), env=box.environ, cwd="/")
        fill(box.home)

        def is_refused():
            status, answer = box.call("POST", "/queue", {"command": f"echo after >> {ran}", "after": [ids[0]]})
            after.extend([answer["id"]] if status == 200 else [])
            return status == 503
        live.until(is_refused, "the end of the page that the journal has", interval_s=0)
        (box.home / "supervisor.sh").write_text("exit 1 # of an older nexus\n")
        box.kill_all_of_service()
        go.touch()
        live.until(lambda: not live.find_commands(f"{go} ]"), "the commands' ends")
        old = box.info()

        done = box.nexus("jobs")
        assert done.returncode == 0 and ids[0] in done.stdout and box.info() == old, done
        for code, job_id in ids.items():
            words = UNRECORDED.format(code)
            live.until(lambda words=words: f"running; {words}" in box.nexus("jobs").stdout, words)
            assert f"Job {job_id}: running; {words}\n" in box.nexus("show", job_id).stdout
            assert box.nexus().stdout.count(words) == 1 and words in box.nexus("top").stdout
            job, row = box.job(job_id), box.ask("GET", "/status?after=0")["jobs"][job_id]
            assert (job["status"], job["exit_code"], job["unrecorded"]) == ("running", None, words) and row["unrecorded"] == words
        assert [box.job(job_id)["status"] for job_id in after] == ["pending"] * len(after) and waiter.poll() is None
        for command in (["add", "true"], ["kill", ids[0]]):
            done = box.nexus(*command)
            assert done.returncode == 6 and "No space left" in done.stderr and "goes on by itself" in done.stderr, (command, done)
        assert any("service.json: No space left" in hint for hint in box.status()["hints"]) and box.nexus("health").returncode

        # service.json still tells of the service that was killed: this one is found, stopped and started without it
        pid = box.ask("GET", "/")["pid"]
        assert pid != old["pid"] and "runs already" in box.nexus("start").stderr
        assert box.nexus("restart").returncode == 0 and not live.is_alive(pid)
        pid = box.ask("GET", "/")["pid"]
        live.kill(pid)
        live.until(lambda: box.ask("GET", "/")["pid"] != pid, "the supervisor to start it again")
        pid = box.ask("GET", "/")["pid"]
        assert box.nexus("stop").returncode == 0 and not live.is_alive(pid) and "does not run" in box.nexus("stop").stderr
        assert box.nexus("jobs").returncode == 0 and box.job(ids[5])["status"] == "running"

        (box.home / "filler").unlink()
        job = box.wait(ids[0], "completed")
        assert job["attempt"] == 1 and "No space left on device" in " ".join(job["notes"]) and job["unrecorded"] is None
        assert "(the job's logs may be cut)" in box.nexus("show", ids[0]).stdout
        job = box.wait(ids[5], "failed")
        assert (job["attempt"], job["exit_code"], job["cause"]) == (1, 5, "exit") and "No space left" in job["cause_line"]
        assert waiter.wait(live.PATIENCE_S) == 0
        for job_id in after:
            box.wait(job_id, "completed")
        assert sorted(ran.read_text().split()) == ["0", "5", *["after"] * len(after)]
        box.await_service()                             # by service.json
        live.until(lambda: box.health()["is_healthy"], "a look at the disks")
        assert box.wait(box.add("true"), "completed")["notes"] == [] and "Internal error" not in box.log()


def test_a_job_that_ends_on_a_full_disk_while_no_service_runs():
    """And none does before there is room: its runner has seen it."""
    with small_home(launcher="direct", is_supervised=False) as box:
        box.start()
        job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done"))
        box.kill_all_of_service()
        fill(box.home)
        box.path("go").touch()
        live.until(lambda: not live.find_commands(f"{box.path('go')} ]"), "its command's end")
        live.until(lambda: [pid for pid in live.descendants(job["pid"]) if live.read(f"/proc/{pid}/comm") == "sleep\n"], "a pause")
        (box.home / "filler").unlink()
        live.until(lambda: not live.is_alive(job["pid"]), "its runner's end")
        box.start()
        job = box.wait(job["id"], "completed")
        assert job["attempt"] == 1 and "the job's logs may be cut" in " ".join(job["notes"])


def test_a_home_in_which_no_file_can_be_made():
    """No inode is left: the files that are there are enough for a start, and the journal takes jobs."""
    with small_home("size=9m,nr_inodes=120", launcher="direct", is_supervised=False) as box:
        box.start()
        before = box.add("exit 3")
        box.wait(before, "failed")
        box.kill_all_of_service()
        made = 0
        with contextlib.suppress(OSError):
            for made in range(1000):
                (box.home / f"filler-{made}").touch()
        done = box.nexus("jobs")
        assert done.returncode == 0 and before in done.stdout, (made, done)
        late = box.add("true")
        live.until(lambda: "No space left" in (box.job(late)["waiting_for"] or ""), lambda: box.job(late))
        for path in box.home.glob("filler-*"):
            path.unlink()
        box.wait(late, "completed")
        box.await_service()


def test_a_first_start_on_a_full_disk():
    with small_home(launcher="direct") as box:
        fill(box.home)
        done = box.nexus()
        assert done.returncode == 0 and "No space left" in done.stdout and not (box.home / "state.json").exists(), done
        done = box.nexus("add", "true")
        assert done.returncode == 6 and "No space left" in done.stderr, done
        (box.home / "filler").unlink()
        live.until((box.home / "state.json").exists, "it to go on by itself")
        assert box.nexus("add", "true").returncode == 0
        box.await_service()
        assert len((box.home / "token").read_text()) > 16


READ_ONLY = [  # words, exit code, part of stdout, part of stderr
    ([], 0, "Queue: 1 job pending", ""), (["status", "--json"], 0, '"queued_jobs": 1', ""), (["jobs"], 0, "exit 3", ""),
    (["history"], 0, "exit 3", ""), (["queue"], 0, "Read-only file system", ""), (["why", "later"], 0, "Read-only file system", ""),
    (["show", "later"], 0, "echo later", ""), (["logs", "-n", "1", "first"], 0, "hello", ""), (["usage"], 0, "1 of 1 ended", ""),
    (["health"], 1, "BAD  state", ""), (["metrics"], 0, "Total Jobs: 1", ""), (["config"], 0, "port = ", ""),
    (["logs", "service", "-n", "1"], 0, "Service ended", ""), (["token", "list"], 0, "", ""),
    (["add", "true"], 6, "", "nothing can be changed, and no service runs"), (["cancel", "later"], 6, "", "nothing can be changed"),
    (["wait", "later"], 6, "", "nothing can be changed"), (["logs", "-f", "first"], 0, "hello", ""),
    (["open"], 6, "", "nothing can be changed"), (["pause"], 6, "", "nothing can be changed"),
]


def test_what_reads_works_in_a_home_that_takes_no_writes():
    """No service can run there."""
    with Home(gpus=2, launcher="direct") as box, small_disk(box.home, "size=50m"):
        box.write_config()
        box.start()
        box.wait(box.add("echo hello; exit 3", name="first"), "failed")
        box.nexus("add", "--begin", "+1h", "--name", "later", "echo later")
        assert box.nexus("stop").returncode == 0
        subprocess.run(["mount", "-o", "remount,ro", box.home], check=True)
        for words, code, out, err in READ_ONLY:
            done = box.main(*words)
            assert done.code == code and out in done.out and err in done.err, (words, done)
        subprocess.run(["mount", "-o", "remount,rw", box.home], check=True)
        box.nexus("edit", "later", "--begin", "none")
        box.wait(json.loads(box.nexus("show", "later", "--json").stdout)["id"], "completed")

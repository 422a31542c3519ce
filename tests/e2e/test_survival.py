"""What a researcher must not lose: real services, runners and screens, killed at the worst moments."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import live
import pytest
import shared

import nexus


@pytest.fixture(scope="module")
def service():
    with shared.Service(gpus=4, launcher="screen", cpu_slots=8, kill_grace_seconds=1) as made:
        yield made


@pytest.fixture
def box(service):
    with service.lend() as box:
        yield box


def hold(box, name="go", code=0):
    """A command that waits for box.path(name).touch()."""
    return f"while [ ! -e {box.path(name)} ]; do sleep 0.1; done; exit {code}"


class Load:
    """Submits jobs without a pause, each until it is acknowledged; what each job did is in a file."""

    def __init__(self, box, pause_s=0.05):
        self.box, self.pause_s, self.ids, self.refused = box, pause_s, [], 0
        self.done = box.path("done")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        number = 0
        while not self.stop.is_set():
            number += 1
            command = f'echo "$NEXUS_JOB_ID {number}" >> {self.done}; sleep 0.0{number % 7}; exit {number % 3}'
            while True:
                try:
                    status, answer = self.box.call("POST", "/queue", {"command": command}, key=f"load-{number:08d}")
                except live.Lost:
                    time.sleep(0.02)
                    continue
                if status == 200:
                    break
                assert status == 503, (status, answer)
                self.refused += 1
                time.sleep(0.05)
            self.ids.append((answer["id"], number))
            self.stop.wait(self.pause_s)

    def check(self):
        """Every acknowledged job ran, once, and its exit code is known."""
        self.stop.set()
        self.thread.join(live.PATIENCE_S)
        assert self.ids and not self.thread.is_alive()
        jobs = live.until(lambda: (jobs := self.box.ask("GET", "/jobs")) and all(
            job["status"] in ("completed", "failed") for job in jobs) and jobs, lambda: f"the last jobs\n{self.box.log()[-3000:]}")
        jobs = {job["id"]: job for job in jobs}
        ran = [tuple(line.split()) for line in self.done.read_text().splitlines()]
        assert sorted(ran) == sorted((job_id, str(number)) for job_id, number in self.ids)
        for job_id, number in self.ids:
            assert (jobs[job_id]["exit_code"], jobs[job_id]["cause"]) == (number % 3, "exit" if number % 3 else None), jobs[job_id]
        return len(self.ids)


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_service_killed_at_random_moments(launcher):
    """No acknowledged job is lost, and none is started twice."""
    chance = random.Random(launcher)
    with live.Box(gpus=4, launcher=launcher) as box:
        load = Load(box)
        for _ in range(4):
            time.sleep(chance.random() * 0.5)           # the moment is the point
            if chance.random() < 0.5:
                shared.crash(box)
            else:                                       # somebody types a command
                box.kill_service()
                box.nexus("start")
                box.await_service()
        assert load.check() > 3


def test_supervisor_starts_it_again(box):
    job = box.wait_started(box.add(hold(box, code=5)))
    waits = box.add("true", after_any=[job["id"]])
    for _ in range(2):
        old = box.kill_service()
        assert box.await_service() != old
        assert box.job(job["id"])["status"] == "running" and box.job(waits)["status"] == "pending"
    box.path("go").touch()
    assert box.wait(job["id"], "failed")["exit_code"] == 5
    box.wait(waits, "completed")


def test_stopped_while_the_supervisor_is_about_to_start_it(box):
    """`stop` means stop, also in the second between a crash and the next start."""
    box.kill_service()
    assert box.nexus("stop").returncode == 0
    live.until(lambda: not box.supervisors(), "the supervisor to give up")
    assert not box.pid()


BOTH = "nexus.py and config.toml"
EXCHANGED = [  # reason, what becomes of nexus.py and of config.toml under a running service, what is said to have changed
    ("half of them has arrived", lambda text: text[:len(text) // 2], lambda text: text[:text.index("port") + 6], BOTH),
    ("they are gone", lambda text: None, lambda text: None, BOTH),
    ("nexus.py works, and is another", lambda text: text + "# newer\n", None, "nexus.py"),
    ("config.toml cannot be read", None, lambda text: "#" * (nexus.FILE_BYTES + 1), "config.toml"),
    ("FIFOs are in their place", "fifo", "fifo", BOTH),
]


def exchange(path, change, text):
    if change == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif change:
        changed = change(text)
        path.unlink() if changed is None else path.write_text(changed)


def test_a_crash_comes_back_with_what_ran():
    """Whatever the files are by then; a restart takes those that are there."""
    with live.Box(gpus=1, is_starting=False, launcher="screen", cpu_slots=3) as box:
        program, settings = shared.give_program(box), box.home / "config.toml"
        texts = {path: path.read_text() for path in (program, settings)}
        assert box.nexus("start").returncode == 0
        waits, before = box.add("true", begin="+1h"), box.info()
        for reason, code, config, changed in EXCHANGED:
            for path, change in ((program, code), (settings, config)):
                exchange(path, change, texts[path])
            shared.crash(box, 2 if changed == "nexus.py" else 1)         # the second time it is a copy that has crashed
            assert (box.info()["hash"], box.info()["port"]) == (before["hash"], before["port"]), reason
            assert box.job(waits)["status"] == "pending"
            told = {check["name"]: check["reading"] for check in box.health()["checks"]}["copies"]
            names = changed.replace("nexus.py", str(program)).replace("config.toml", str(settings))
            assert f"as it was: {names} changed meanwhile" in told and f"{names} changed meanwhile" in box.log(), reason
            for path, text in texts.items():
                path.unlink(missing_ok=True)
                path.write_text(text)
        assert "changed meanwhile" in box.nexus("status").stdout
        assert box.nexus("restart").returncode == 0 and "copies" not in str(box.health())
        assert len(box.shells()) == 1 and len(list((box.home / "cache").glob("**/nexus-*.pyc"))) <= 2


def test_a_home_has_one_supervisor():
    """Whoever starts a service that was killed ends the supervisor that was about to; `stop` leaves none."""
    with live.Box(gpus=1, launcher="direct") as box:
        first = box.shells()
        box.kill_service()
        box.hold_supervisor(*first)
        box.start()
        second = box.shells()
        assert len(first) == len(second) == 1 and first != second
        box.kill_service()
        box.hold_supervisor(*second)
        assert box.nexus("stop").returncode == 0 and not box.shells()
        box.start()
        assert len(box.shells()) == 1 and not set(box.shells()) & {*first, *second}
        assert box.nexus("stop").returncode == 0 and not box.shells()


def test_job_that_ends_while_the_service_is_down(box):
    job = box.wait_started(box.add(f"echo begun; while [ ! -e {box.path('go')} ]; do sleep 0.05; done; echo ended; exit 7"))
    box.kill_all_of_service()
    box.path("go").touch()
    result = pathlib.Path(job["log_dir"], "result-1.json")
    live.until(lambda: result.exists() and not live.is_alive(job["pid"]), "the job's end")
    time.sleep(1.2)                                 # another second on the clock
    box.start()
    job = box.wait(job["id"], "failed")
    told = json.loads(result.read_text())
    assert (job["exit_code"], job["cause"], job["runtime_seconds"]) == (7, "exit", told["runtime_seconds"])
    assert job["finished_at"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.stat().st_mtime))
    assert box.logs(job["id"], "stdout") == "begun\nended\n"


DEATHS = [  # who is killed, what becomes of the job
    ("screen", ("failed", "exit", 3)),
    ("runner", ("failed", "session-lost", None)),
    ("command", ("failed", "signal", 137)),
    ("service screen runner", ("failed", "session-lost", None)),        # comes last: the others begin before it
]


def test_deaths(box):
    """Each of another job's."""
    go, jobs, pids = box.path("go"), {}, {}
    for number, (victims, _) in enumerate(DEATHS):
        script = box.path(f"work-{number}.sh")
        script.write_text(f"echo begun; while [ ! -e {go} ]; do sleep 0.1; done; echo ended; exit 3\n")
        jobs[victims] = box.add(f"exec sh {script}")
    then = box.add("true")
    for number, (victims, _) in enumerate(DEATHS):
        job, script = box.wait_started(jobs[victims]), box.path(f"work-{number}.sh")
        live.until(lambda job=job: box.logs(job["id"], "stdout") == "begun\n")
        command, = [pid for pid in live.find_commands(f"sh {script}") if live.stat(pid)[1:2] == [str(job["pid"])]]
        pids[victims] = {"screen": int(job["session"].partition(".")[0]), "runner": job["pid"], "command": command}
    for victims, _ in DEATHS:
        dead = [pids[victims][name] for name in victims.split() if name != "service"]
        if "service" in victims:
            box.kill_all_of_service()
        live.kill(*dead)
        live.until(lambda dead=dead: not any(map(live.is_alive, dead)))
        if victims in ("runner", "command"):
            box.wait(jobs[victims], "failed")
    box.start()
    go.touch()
    for number, (victims, wanted) in enumerate(DEATHS):
        job = box.wait(jobs[victims], "failed")
        assert (job["status"], job["cause"], job["exit_code"]) == wanted, victims
        assert not live.find_commands(f"sh {box.path(f'work-{number}.sh')}"), victims
        if wanted[1] == "exit":
            assert box.logs(job["id"], "stdout") == "begun\nended\n"
    box.wait(then, "completed")


def test_stop_while_jobs_run(box):
    jobs = [box.wait_started(box.add(hold(box, code=code), gpus=2))["id"] for code in (0, 9)]
    waits = box.add("true")
    done = box.nexus("stop")
    assert done.returncode == 0 and not box.pid() and not (box.home / "service.json").exists()
    live.until(lambda: not box.supervisors(), "the supervisor to end with it")
    assert box.nexus("stop").returncode == 0        # it does not run: that is fine
    box.start()
    assert [box.job(job_id)["status"] for job_id in (*jobs, waits)] == ["running", "running", "pending"]
    assert [gpu["job_id"] for gpu in box.status()["gpu_status"]] == [jobs[0]] * 2 + [jobs[1]] * 2
    box.path("go").touch()
    assert box.wait(jobs[0], "completed")["attempt"] == 1 and box.wait(jobs[1], "failed")["exit_code"] == 9
    box.wait(waits, "completed")


def test_an_accepted_kill_survives_the_service(box):
    job = box.wait_started(box.add("trap '' TERM; while :; do sleep 0.1; done"))
    box.ask("DELETE", f"/jobs/{job['id']}")
    shared.crash(box)
    assert box.wait(job["id"], "cancelled")["cause"] == "killed"


def test_two_services_at_once():
    with live.Box(gpus=1, is_starting=False) as box:
        both = [subprocess.Popen(box.argv("serve"), env=box.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True) for _ in range(2)]
        box.await_service()
        loser = live.until(lambda: next((one for one in both if one.poll() is not None), None), "the loser to leave")
        out, err = loser.communicate()
        assert loser.returncode == 4 and "runs already" in err and not out
        winner = next(one for one in both if one is not loser)
        assert box.pid() == winner.pid and box.wait(box.add("true"), "completed")
        done = box.nexus("serve")
        assert done.returncode == 4 and f"pid {winner.pid}" in done.stderr
        winner.terminate()
        assert winner.wait(live.PATIENCE_S) == 0
        winner.communicate()


def test_many_commands_start_one_service():
    with live.Box(gpus=1, is_starting=False, launcher="screen") as box:
        adds = [subprocess.Popen(box.argv("add", f"echo {number} >> {box.path('done')}"), env=box.environ, stdin=subprocess.DEVNULL,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for number in range(3)]
        answers = [(*add.communicate(timeout=live.PATIENCE_S), add.returncode) for add in adds]
        assert all(code == 0 for _, _, code in answers), answers
        for out, _, _ in answers:
            box.wait(out.strip(), "completed")
        assert sorted(live.read(box.path("done")).split()) == list("012")
        live.until(lambda: len(box.supervisors()) <= 2, "the other supervisors to leave")


def edit(box, old, new):
    """Another machine, or another boot, wrote the state: as if it had."""
    for path in [*box.home.glob("state.json*"), *box.home.glob("journal.jsonl*")]:
        path.write_text(live.seal(path.read_text().replace(old, new)))


@pytest.mark.parametrize("on_reboot, wanted", [("fail", ("failed", "reboot", 1)), ("requeue", ("completed", None, 2))])
def test_the_machine_went_down(box, on_reboot, wanted):
    job = box.wait_started(box.add(f"[ -e {box.path('go')} ] || sleep 600"))
    ended = box.wait_started(box.add(hold(box, code=4)))
    waits = box.add("true", after_any=[ended["id"]])
    box.kill_all_of_service()
    box.path("go").touch()
    live.until(lambda: os.path.exists(f"{ended['log_dir']}/result-1.json"))
    live.kill_all(f"{box.folder}/")
    boot_id = live.read("/proc/sys/kernel/random/boot_id").strip()
    edit(box, boot_id, "11111111-2222-3333-4444-555555555555")
    box.write_config(on_reboot=on_reboot)
    # The pid is another process now
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        edit(box, f'"pid":{job["pid"]},', f'"pid":{other.pid},')
        box.start()
        job = box.wait(job["id"], wanted[0])
        assert (job["status"], job["cause"], job["attempt"]) == wanted
        assert box.wait(ended["id"], "failed")["exit_code"] == 4
        box.wait(waits, "completed")
        assert other.poll() is None
        other.kill()


def test_home_shared_with_another_machine(box):
    box.kill_all_of_service()
    (box.home / "service.json").write_text(json.dumps({**box.info(), "machine": "gpu1", "boot_id": "another"}))
    before = {path: path.read_bytes() for path in box.home.iterdir() if path.name.startswith(("state", "journal"))}
    for command in (["start"], ["add", "true"], ["status"], ["serve"], ["stop"]):
        done = box.nexus(*command)
        assert done.returncode == 4, (command, done)
        for words in ("the service runs on gpu1", "set NEXUS_HOME=~/.nexus-$(hostname) or NEXUS_URL"):
            assert words in done.stderr, (command, done.stderr)
    assert {path: path.read_bytes() for path in before} == before
    (box.home / "service.json").unlink()


def test_the_machine_gets_another_name():
    """As by DHCP: its boot and its PID namespace are the same, so its service is found, started again, and ended."""
    with live.Box(gpus=1, is_starting=False) as box:
        go = box.path("go")
        subprocess.run(["unshare", "--uts", "sh", "-c", 'hostname before; exec "$@"', "-", *box.argv("start")], env=box.environ, check=True,
                       stdin=subprocess.DEVNULL, capture_output=True)
        assert box.info()["machine"] == "before"
        job = box.wait_started(box.add(f"while [ ! -e {go} ]; do sleep 0.05; done; exit 5"))
        added = box.nexus("add", "--gpus", "0", "true")             # this process has always had the other name
        assert added.returncode == 0, added.stderr
        box.wait(added.stdout.strip(), "completed")
        subprocess.run(["nsenter", "-t", str(box.pid()), "--uts", "hostname", "after"], check=True)
        box.kill_service()
        box.await_service()                                         # by its supervisor
        assert box.info()["machine"] == "after"
        go.touch()
        assert box.wait(job["id"], "failed")["exit_code"] == 5
        waits = box.wait_started(box.add("sleep 600"))
        assert box.nexus("stop").returncode == 0
        box.start()                                                 # a new one has the jobs of the one with the other name
        assert box.job(waits["id"])["status"] == "running" and box.info()["machine"] not in ("before", "after")
        inside = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "--uts", "sh", "-c", 'hostname box; exec "$@"', "-",
                                 *box.argv("status")], env=box.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert inside.returncode == 4 and "the service runs on" in inside.stderr, inside      # a container has the same boot


def test_a_disk_that_hangs_holds_up_no_reader():
    """Until it has been written nothing is acknowledged, and nothing of it is shown."""
    with live.Box(gpus=1, is_starting=False) as box:
        gate = box.folder / "hangs"
        box.serve("import os, time; real = os.fdatasync; os.fdatasync = lambda fd: [time.sleep(0.01) for _ in iter("
                  f"lambda: os.path.exists({str(gate)!r}), False)] and None or real(fd)")
        box.ask("POST", "/service/pause")
        first = box.add("true")
        gate.touch()
        answers = []
        writer = threading.Thread(target=lambda: answers.append(box.add("false")))
        writer.start()
        for path in ("/status", "/queue", "/jobs", f"/jobs/{first}", "/health", "/metrics", "/gpus", "/") * 3:
            box.call("GET", path)
        assert [job["id"] for job in box.ask("GET", "/queue")] == [first] and not answers
        gate.unlink()
        writer.join()
        assert [job["id"] for job in box.ask("GET", "/queue")] == [first, *answers]


def test_another_program_on_the_port():
    """An own one, then another user's."""
    with live.Box(gpus=1, is_starting=False) as box:
        for uid in (0, 65534):
            with live.listener(box.port, uid) as heard:
                done = box.nexus("add", "true")
                assert done.returncode == 4 and f"port {box.port}" in done.stderr and "in use" in done.stderr, done
                assert "[service] port" in done.stderr and heard() == "listens\n"
                if uid:
                    check_port_is_not_called(box)
                    assert heard() == "listens\n"


def check_port_is_not_called(box):
    """service.json names a process that lives, as while a service starts or ends: the port is not called in place of api.sock."""
    own = os.getpid()
    box.home.joinpath("service.json").write_text(json.dumps({
        "pid": own, "started": int(live.stat(own)[19]), "boot_id": nexus.read_boot_id(), "url": f"http://127.0.0.1:{box.port}",
        "port": box.port, "socket": str(box.home / "api.sock"), "machine": nexus.read_machine()}))
    for command in (["add", "true"], ["status"], ["logs", "-f", "abc"], ["stop"]):
        done = box.nexus(*command)
        assert done.returncode == 6 and not done.stdout and "api.sock is gone" in done.stderr and f"kill {own}" in done.stderr, done


def test_the_socket_was_deleted(box):
    """A command says so at once, and what it says to type helps."""
    job, pid = box.wait_started(box.add("sleep 300")), box.pid()
    box.home.joinpath("api.sock").unlink()
    began = time.monotonic()
    done = box.nexus("status")
    assert done.returncode == 6 and "api.sock is gone" in done.stderr and f"\nhint: kill {pid} ends it" in done.stderr, done
    assert time.monotonic() - began < 10            # a lost connection is tried again for 30 s
    os.kill(pid, signal.SIGTERM)
    live.until(lambda: not box.pid(), "the service to end")
    assert job["id"] in box.nexus("status").stdout and box.pid() != pid
    assert box.job(job["id"])["status"] == "running"


@pytest.mark.parametrize("launcher", ["screen", "direct"])
def test_service_started_from_inside_a_job(box, launcher):
    """It is not the job's: it knows nothing of the job's environment, and survives the job."""
    with live.Box(gpus=1, launcher=launcher, is_starting=False) as inner:
        start = f"NEXUS_HOME={inner.home} NEXUS_MOCK_GPUS=1 {sys.executable} {live.COMMAND}"
        killed = box.add(f"{start} add 'echo inner $NEXUS_JOB_ID; sleep 600' > {box.path('id')}; sleep 600")
        inner_job = live.until(lambda: live.read(box.path("id")).strip(), "the job inside")
        pid, inner_pid = inner.await_service(), inner.wait_started(inner_job)["pid"]
        environ = live.read_bytes(f"/proc/{pid}/environ").split(b"\0")
        assert not [entry for entry in environ if entry.startswith((b"NEXUS_JOB_", b"CUDA_VISIBLE_DEVICES="))]
        assert not [target for fd in os.listdir(f"/proc/{pid}/fd") if str(box.folder) in (target := read_link(f"/proc/{pid}/fd/{fd}"))]
        box.ask("DELETE", f"/jobs/{killed}")
        box.wait(killed, "cancelled")
        box.wait(box.add("true"), "completed")
        assert live.is_alive(pid) and live.is_alive(inner_pid) and inner.supervisors()
        assert inner.job(inner_job)["status"] == "running" and f"inner {inner_job}" not in inner.logs(inner_job, "stderr")


def read_link(path):
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


SIGNALS = [  # a command that signals its group, what is said of its end
    ("trap 'kill 0' EXIT; sleep 600 & exit 3", ("signal", 143)),       # many scripts end so
    ("kill 0; sleep 9", ("signal", 143)), ("kill $PPID; exit 3", ("exit", 3)),
    ("kill -INT 0; sleep 9", ("signal", 130)), ("kill -HUP 0; sleep 9", ("signal", 129)),
]


SHOW_INHERITED = ("nice; cat /proc/self/oom_score_adj; sed -n 's/^\\(SigIgn\\|SigBlk\\|Cpus_allowed_list\\):.//p' /proc/self/status; "
                  "chrt -p $$ | sed -n 's/.*policy: //p'; ionice -p $$; echo $RUNNER_TRACKING_ID.$JENKINS_NODE_COOKIE.$BUILD_ID")


@pytest.mark.parametrize("launcher", ["direct", "screen"])
def test_no_job_has_what_the_starter_of_the_service_had(launcher):
    """As a CI system's job, or a program that is pinned to a core, may type the first command.  What a submitter has, his job has."""
    marks = {"RUNNER_TRACKING_ID": f"github_{launcher}", "JENKINS_NODE_COOKIE": f"jenkins_{launcher}", "BUILD_ID": "7"}
    with live.Box(gpus=1, is_starting=False, launcher=launcher, environ=marks) as box:
        starter = ('trap "" PIPE INT HUP USR1 TERM; echo 500 > /proc/self/oom_score_adj; '
                   'exec nice -n 7 chrt -i 0 ionice -c 3 taskset -c 0 "$@"')
        subprocess.run(["sh", "-c", starter, "-", *box.argv("start")], env=box.environ, stdin=subprocess.DEVNULL, capture_output=True,
                       check=True)
        none, cpus = "0" * 16, live.read("/proc/self/status").partition("Cpus_allowed_list:\t")[2].partition("\n")[0]
        clean = ["0", "0", none, none, cpus, "SCHED_OTHER", "none: prio 0", "..7"]

        def show(job_id):
            box.wait(job_id, "completed")
            # Of what posix_spawn() starts, the C library's own two signals are ignored.
            return sorted(box.logs(job_id, "stdout").replace("0000000180000000", none).split("\n")[:-1])

        assert show(box.add(SHOW_INHERITED)) == sorted(clean)
        supervisor, = box.shells()
        for pid in (box.pid(), supervisor):
            assert live.read(f"/proc/{pid}/oom_score_adj") == "0\n" and os.sched_getscheduler(pid) == os.SCHED_OTHER
            assert os.getpriority(os.PRIO_PROCESS, pid) == 0 and os.sched_getaffinity(pid) == os.sched_getaffinity(0)
        done = subprocess.run(["nice", "-n", "7", "taskset", "-c", "0", *box.argv("add", SHOW_INHERITED)], env=box.environ, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True)
        assert show(done.stdout.strip()) == sorted(["7", *clean[1:4], "0", *clean[5:]]), done
        assert show(box.add(SHOW_INHERITED)) == sorted(clean), "the service itself is as it was"
        box.wait_started(box.nexus("add", "sleep 600").stdout.strip())
        assert not [pid for mark in list(marks.values())[:2] for pid in live.find_processes(mark, ["environ"])]
        assert "starter" not in str(box.health())


def test_what_of_the_starter_cannot_be_reset_is_told():
    with live.Box(gpus=1, is_starting=False) as box:
        subprocess.run(["prlimit", "--cpu=100000:200000", "--fsize=4000000000:unlimited", "--", "nice", "-n", "7",
                        "setpriv", "--no-new-privs", "--bounding-set=-all", *box.argv("start")], env=box.environ,
                       stdin=subprocess.DEVNULL, capture_output=True, check=True)
        told = {check["name"]: check for check in box.health()["checks"]}["starter"]
        assert told["is_ok"] and "nice 7, a limit of CPU time, no_new_privs" in told["reading"]
        assert live.read(f"/proc/{box.pid()}/limits").count("200000 ") == 2


def test_jobs_that_signal_their_group(box):
    for job_id, (_, wanted) in zip([box.add(command, gpus=0) for command, _ in SIGNALS], SIGNALS):
        job = box.wait(job_id, "failed")
        assert (job["cause"], job["exit_code"]) == wanted
    box.wait(box.add("true"), "completed")


def test_without_its_fifo(box):
    """Somebody removed it: starts and ends are noticed all the same."""
    (box.home / "events").unlink()
    for _ in range(2):
        assert box.wait(box.add("exit 3"), "failed")["exit_code"] == 3
    box.kill_all_of_service()                       # the next service makes it again


def test_log_folder_removed_under_a_running_job(box):
    job = box.wait_started(box.add(f"while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 3"))
    subprocess.run(["rm", "-rf", job["log_dir"]], check=True)
    box.path("go").touch()
    assert box.wait(job["id"], "failed")["exit_code"] == 3
    live.until(lambda: not live.is_alive(job["pid"]), "its job.sh to end")
    box.wait(box.add("true"), "completed")


def test_a_service_whose_home_is_removed_ends(box):
    """Nothing could be told it any more, and its port would be taken for whoever begins anew."""
    pid, supervisors = box.pid(), box.supervisors()
    subprocess.run(["rm", "-rf", box.home], check=True)
    live.until(lambda: not live.is_alive(pid) and not any(map(live.is_alive, supervisors)), "both to end")
    box.home.mkdir(mode=0o700)
    box.write_config()
    box.start()
    box.wait(box.add("true"), "completed")


def test_stopped_service_delays_no_job(box):
    """SIGSTOP: runners go on saying things to it, and what they said is heard later."""
    jobs = [box.add(f"exit {code}") for code in (0, 3)]
    running = box.wait_started(box.add(f"touch {box.path('on')}; while [ ! -e {box.path('go')} ]; do sleep 0.05; done; exit 4"))
    live.until(lambda: box.path("on").exists())
    pid = box.pid()
    live.kill(pid, number=signal.SIGSTOP)
    box.path("go").touch()
    live.until(lambda: not live.find_commands(f"{box.path('go')}"), "its command's end")     # its runner may wait for another job
    live.kill(pid, number=signal.SIGCONT)
    assert box.wait(running["id"], "failed")["exit_code"] == 4
    assert box.wait(jobs[0], "completed") and box.wait(jobs[1], "failed")["exit_code"] == 3

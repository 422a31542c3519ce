#!/usr/bin/env python3
"""What nexus costs, as a table; run by hand: python3 tests/bench/bench.py [NAME...]

Speed is given as a ratio to something measured in the same run (`python3 -c pass`, the same call on an empty queue)
wherever there is such a thing: machines differ, and are shared.  Each measure has a service of its own, in a temporary
NEXUS_HOME, with a made-up nvidia-smi that answers in a millisecond.
"""
from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP), str(TOP / "tests/bench")]
import fair  # noqa: E402

import nexus  # noqa: E402

SMI = """#!/bin/sh
case $* in *compute-apps*) exit;; esac
i=0
while [ $i -lt {gpus} ]; do echo "$i, GPU-bench-$i, NVIDIA H100, 81559, 0, 0, 30, 70.00, 700.00, [N/A], Default"; i=$((i + 1)); done
"""
ROWS: list[tuple[str, str, str]] = []


def report(what: str, measured: str, limit: str = "") -> None:
    ROWS.append((what, measured, limit))
    print(f"{what:<66} {measured:<34} {limit}", flush=True)


class Bench:
    """A service of its own."""

    bob = b""                               # a header with the token of the user bob

    def __init__(self, gpus: int = 1, launcher: str = "screen") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nexus-bench-"))
        binaries = self.folder / "bin"
        binaries.mkdir()
        (binaries / "nvidia-smi").write_text(SMI.format(gpus=gpus))
        (binaries / "nvidia-smi").chmod(0o755)
        self.home = self.folder / "home"
        self.home.mkdir()
        self.port = random.randrange(20000, 30000)
        (self.home / "config.toml").write_text(
            f'[service]\nport = {self.port}\n[gpu]\nlease_dir = "{self.folder}/leases"\n'
            f'[jobs]\nlauncher = "{launcher}"\nqueue_limit = 1000000\n')
        self.environ = {**os.environ, "NEXUS_HOME": str(self.home), "HOME": str(self.folder), "PATH": f"{binaries}:{os.environ['PATH']}"}
        self.environ.pop("NEXUS_MOCK_GPUS", None)
        self.command("start")
        self.client = nexus.Client.find(self.environ)

    def command(self, *words: str) -> None:
        subprocess.run([sys.executable, str(TOP / "nexus.py"), *words], env=self.environ, check=True, capture_output=True)

    def log(self) -> str:
        return (self.home / "service.log").read_text()

    @property
    def pid(self) -> int:
        return int(json.loads((self.home / "service.json").read_text())["pid"])

    def post(self, count: int) -> float:
        """Seconds to queue so many jobs, in lists of at most 10,000."""
        took = 0.0
        for at in range(0, count, 10000):
            body = json.dumps([{"command": f"true {n}", "gpus": 1} for n in range(at, min(count, at + 10000))]).encode()
            began = time.perf_counter()
            line = http.client.HTTPConnection("127.0.0.1", self.port)
            line.request("POST", "/queue", body, {"Content-Type": "application/json"})
            answer = line.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            took += time.perf_counter() - began
        return took

    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def cpu_s(self, of_children: bool = False) -> float:
        """CPU time of the service, or of what it started and has reaped."""
        cells = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, cells[13:15] if of_children else cells[11:13])) / os.sysconf("SC_CLK_TCK")

    def await_rest(self) -> None:
        """Until the service has done what was left to do."""
        used = -1.0
        while self.cpu_s() - used > 0.02:
            used = self.cpu_s()
            time.sleep(0.5)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for job in self.client.jobs(status="running"):
                self.client.cancel(ids=[job["id"]])
        with contextlib.suppress(Exception):
            self.command("stop")
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def bench(**options: object) -> Iterator[Bench]:
    made = Bench(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def median_ms(act: Callable[[], object], count: int = 20) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def list_gaps(it: Bench, waiting: int = 0, count: int = 100) -> list[float]:
    """What lies between the end of one job and the start of the next on the one GPU, in ms, sorted."""
    stamps, gate = it.folder / "stamps", it.folder / "gate"
    os.mkfifo(gate)
    it.client.add(f"read line < {gate}", priority="high")       # holds the GPU until all are queued
    stamp = f'echo "start $EPOCHREALTIME" >> {stamps}; sleep 0.05; echo "end $EPOCHREALTIME" >> {stamps}'
    it.client.add_all([stamp] * (count + 2), priority="high")
    it.post(waiting)
    it.await_rest()                                             # the first state.json is not what is measured
    gate.write_text("go\n")
    while not stamps.exists() or stamps.read_text().count("end") <= count:
        time.sleep(0.05)
    it.client.pause(0)
    times = [(line.split()[0], float(line.split()[1])) for line in stamps.read_text().splitlines()]
    return sorted((times[at + 1][1] - times[at][1]) * 1000 for at in range(1, 2 * count, 2))


def measure_gap() -> None:
    """From the end of one job to the start of the next on its GPU."""
    for launcher, limit in (("screen", 20), ("direct", 13)):
        medians = {}
        for waiting in (10, 10000):
            with bench(launcher=launcher) as it:
                before = it.cpu_s(), it.cpu_s(of_children=True)
                gaps = list_gaps(it, waiting)
                own = (it.cpu_s() - before[0]) * 10
                while Path(f"/proc/{it.pid}/task/{it.pid}/children").read_text():      # job.sh of the last one
                    time.sleep(0.1)
                others = (it.cpu_s(of_children=True) - before[1]) * 10
                medians[waiting] = statistics.median(gaps)
                report(f"gap with {launcher}, {waiting} waiting",
                       f"median {medians[waiting]:.1f} ms, p95 {gaps[94]:.1f} ms", f"<= {limit} ms, p95 <= {2 * limit} ms")
                if waiting == 10:
                    report(f"CPU time of a job with {launcher}", f"service {own:.1f} ms, runner and command {others:.1f} ms")
        report(f"gap with {launcher}: 10,000 waiting / 10 waiting", f"{medians[10000] / medians[10]:.2f}", "<= 1.5")


CROWD = """
import fcntl, os, subprocess, sys
folder, processes, leases = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.makedirs(folder, exist_ok=True)
os.chmod(folder, 0o1777)
held = [os.open(f"{folder}/GPU-of-another-machine-{number}", os.O_RDWR | os.O_CREAT, 0o666) for number in range(leases)]
for handle in held:
    fcntl.flock(handle, fcntl.LOCK_SH)
    os.write(handle, b"7-0badcafe bob\\n")
children = [subprocess.Popen(["sleep", "3600"]) for _ in range(processes)]
print("ready", flush=True)
sys.stdin.read()
for child in children:
    child.kill()
"""


def kill_one(it: Bench) -> float:
    """How long it takes until a job that is killed is over, in ms."""
    job = it.client.add("sleep 600", gpus=0)
    while it.client.job(job)["pid"] is None:
        time.sleep(0.01)
    began = time.perf_counter()
    it.client.cancel(ids=[job])
    it.client.wait([job])
    return (time.perf_counter() - began) * 1000


def measure_crowd() -> None:
    """What the start, the end and the kill of a job cost beside 2,000 processes and 3,000 leases of others."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    found: dict[bool, tuple[float, float]] = {}
    for is_crowded in (False, True):
        with bench(launcher="direct", gpus=1) as it:
            counts = ("2000", "3000") if is_crowded else ("0", "0")
            argv = [sys.executable, "-c", CROWD, f"{it.folder}/leases", *counts]
            crowd = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert crowd.stdout and crowd.stdout.readline() == b"ready\n"
            time.sleep(10)                          # until a refresh has seen that they are nobody's
            gap = statistics.median(list_gaps(it))
            it.await_rest()
            found[is_crowded] = gap, statistics.median(kill_one(it) for _ in range(20))
            crowd.communicate(b"")
    for what, alone, crowded in zip(("gap between two jobs", "kill of a job"), found[False], found[True]):
        report(f"{what}: beside 2,000 processes and 3,000 leases / alone",
               f"{crowded:.1f} / {alone:.1f} ms = {crowded / alone:.2f}", "<= 1.5")


def measure_add() -> None:
    """`nexus add` against the start of the interpreter."""
    with bench() as it:
        it.command("install")
        it.client.pause()
        installed = [str(it.folder / ".local/bin/nexus"), "add", "true"]
        plain = [sys.executable, str(TOP / "nexus.py"), "add", "true"]

        def call(argv: list[str]) -> Callable[[], object]:
            return lambda: subprocess.run(argv, env=it.environ, check=True, capture_output=True)

        call(installed)()
        first = 0.0
        for waiting in (0, 10000):
            if waiting:
                it.post(waiting)
                time.sleep(2)
            rounds = [(median_ms(call([sys.executable, "-c", "pass"]), 5), median_ms(call(installed), 5), median_ms(call(plain), 5))
                      for _ in range(6)]
            nothing, fast, slow = (statistics.median(column) for column in zip(*rounds))
            report(f"python3 -c pass ({waiting} waiting)", f"{nothing:.1f} ms")
            report(f"nexus add, installed ({waiting} waiting)", f"{fast:.1f} ms = {fast / nothing:.2f} x pass", "<= 4 x")
            report(f"python3 nexus.py add ({waiting} waiting)", f"{slow:.1f} ms = {slow / nothing:.2f} x pass", "<= 7 x")
            if waiting:
                report("nexus add: 10,000 waiting / none", f"{fast / first:.2f}", "<= 1.2")
            first = fast


def measure_bulk() -> None:
    with bench() as it:
        it.client.pause()
        curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{time_total}", "-H", "Content-Type: application/json", "-d", '{"command": "true"}',
                f"http://127.0.0.1:{it.port}/queue"]

        def post_one() -> float:
            return float(subprocess.run(curl, check=True, capture_output=True).stdout)

        def get_status() -> None:
            line = http.client.HTTPConnection("127.0.0.1", it.port)
            line.request("GET", "/status")
            line.getresponse().read()

        report("one POST /queue by curl", f"{statistics.median(post_one() for _ in range(20)) * 1000:.1f} ms", "<= 10 ms")
        few = median_ms(get_status, 50)
        used = it.cpu_s()
        report("POST /queue with 10,000 jobs", f"{it.post(10000):.2f} s ({it.cpu_s() - used:.2f} s of CPU)", "<= 0.5 s")
        many = median_ms(get_status, 50)
        report("GET /status, 10,000 waiting / none", f"{many / few:.2f} ({few:.1f} and {many:.1f} ms)", "<= 2")
        report("service memory, 10,000 waiting", f"{it.rss_mb():.0f} MB", "<= 170 MB")

        pid = it.pid
        os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        while True:
            with contextlib.suppress(Exception):
                line = http.client.HTTPConnection("127.0.0.1", it.port)
                line.request("GET", "/status")
                if json.loads(line.getresponse().read())["queued_jobs"] >= 10000:
                    break
            time.sleep(0.02)
        report("kill -9 with 10,000 waiting: until it answers again",
               f"{time.perf_counter() - began:.1f} s (1 s of it is the supervisor's; {it.cpu_s():.1f} s of CPU)", "<= 4 s")
        report("service memory after that", f"{it.rss_mb():.0f} MB", "<= 170 MB")


def make_waiting(is_mixed: bool, count: int = 10000, gpus: int = 64) -> nexus.State:
    """So many waiting jobs of 50 kinds, in 200 groups of one kind each or of all, and two half-GPU jobs on every other GPU."""
    state = nexus.State()
    for number in range(0, gpus, 2):
        for half in range(2):
            held = nexus.Attempt(1, gpu_indices=(number,), gpu_uuids=(f"GPU-{number}",), started_at=0.0)
            state.put(nexus.Put("jobs", f"r{number}-{half}", nexus.Job(
                f"r{number}-{half}", "true", "/", "me", 0.0, (0, 1, -number), "", "", gpus=0.5, status="running", expected_time=600.0,
                gpu_mem_mib=10000, attempts=(held,))))
    for group in range(200):
        state.put(nexus.Put("groups", f"g{group}", nexus.Group(f"g{group}", limit=group % 3 * 4)))
    sizes = (0.25, 0.5, 1, 1.5, 2, 4, 8, 64, 0.75, 3)
    for number in range(count):
        kind = number % 50 if is_mixed else number // 50 % 50
        state.put(nexus.Put("jobs", f"{number}", nexus.Job(
            f"{number}", "true", "/", "me", 0.0, (0, number % 3, number), "", "", gpus=sizes[kind % 10], group=f"g{number // 50 % 200}",
            gpu_ids=tuple(range(kind % 10 + 8)) if kind % 10 < 3 and kind > 30 else None,
            gpu_mem_mib=(None, 8000, 20000, 40000, 79000)[kind // 10], expected_time=(None, 60.0, 600.0, 6000.0, None)[kind // 10])))
    return state


def measure_plan() -> None:
    config = nexus.parse_config({}, "")
    gpus = [nexus.Gpu(n, f"GPU-{n}", "H100", 81559.0, 0.0, 30.0) for n in range(64)]
    busy = [nexus.replace(gpu, fault="GPU is lost") for gpu in gpus]
    full = [nexus.replace(gpu, processes=(nexus.GpuProcess(1, 5000.0),)) for gpu in gpus]
    for is_mixed, limit in ((False, 10), (True, 100)):
        state = make_waiting(is_mixed)
        what = f"plan(), 10,000 waiting in {len(state.ready):,} classes, 64 GPUs"
        for now, seen, text in ((1.0, gpus, "32 GPUs free"), (400.0, gpus, "GPUs kept for who waits"),
                                (400.0, full, "somebody is on each GPU"), (400.0, busy, "all GPUs lost")):
            made = nexus.plan(state, seen, None, config, now)
            took = median_ms(lambda: nexus.plan(state, seen, None, config, now), 50)    # noqa: B023
            report(f"{what}: {text}", f"{took:.2f} ms, {len(made.starts)} starts", f"<= {limit} ms")


def measure_idle() -> None:
    with bench(gpus=8) as it:
        time.sleep(5)
        before, began = it.cpu_s(), time.monotonic()
        time.sleep(60)
        used = (it.cpu_s() - before) / (time.monotonic() - began)
        report("idle with 8 GPUs: CPU of the service", f"{used * 100:.2f} % of one core", "<= 0.5 %")
        report("idle with 8 GPUs: memory", f"{it.rss_mb():.0f} MB", "<= 50 MB")


FOLLOWERS, STREAMS, REQUESTS_PER_S, LOAD_S = 200, 50, 100, 15.0


class Load:
    """What a group's browsers and scripts ask at once: followers by curl, short requests from here."""

    def __init__(self, port: int, job_id: str) -> None:
        url = f"http://127.0.0.1:{port}"
        paths = [f"/jobs/{job_id}/logs"] * FOLLOWERS + ["/service/logs"] * STREAMS
        self.streams = [subprocess.Popen(["curl", "-sfN", "-o", "/dev/null", f"{url}{path}?follow=true"]) for path in paths]
        self.failures: list[str] = []
        self.delays: list[float] = []               # of the short requests, in ms
        self.port, self.is_over = port, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        began = time.perf_counter()
        while not self.is_over:
            at = time.perf_counter()
            try:
                line = http.client.HTTPConnection("127.0.0.1", self.port)
                line.request("GET", "/jobs?limit=1" if len(self.delays) % 2 else "/status")
                json.loads(line.getresponse().read())
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))
            self.delays.append((time.perf_counter() - at) * 1000)
            time.sleep(max(0.0, began + len(self.delays) / REQUESTS_PER_S - time.perf_counter()))

    def end(self) -> None:
        self.is_over = True
        self.thread.join(60)
        self.failures += [f"a stream ended: {stream.args}" for stream in self.streams if stream.poll() is not None]
        for stream in self.streams:
            stream.kill()
            stream.wait()


def measure_load() -> None:
    """Starts of jobs beside many followers, streams and requests; three times, to see what memory stays."""
    with bench(gpus=2, launcher="direct") as it:
        talker = it.client.add("while :; do echo a line of some length, as a training loop prints it; sleep 0.1; done")
        while it.client.job(talker)["status"] != "running":
            time.sleep(0.05)
        memory_mb = [it.rss_mb()]
        failures, delays, ratios, shares = [], [], [], []
        for _ in range(3):
            quiet = measure_starts(it, 100)
            load = Load(it.port, talker)
            time.sleep(5)                               # until all of them listen
            at_s, cpu_s = time.perf_counter(), it.cpu_s()
            ratios.append(measure_starts(it, 100) / quiet)
            while time.perf_counter() - at_s < LOAD_S:
                time.sleep(0.1)
            shares.append((it.cpu_s() - cpu_s) / (time.perf_counter() - at_s))
            memory_mb.append(it.rss_mb())
            load.end()
            time.sleep(5)
            memory_mb.append(it.rss_mb())
            failures += load.failures
            delays += load.delays
        report(f"{FOLLOWERS} followers, {STREAMS} of the service's log, {REQUESTS_PER_S} requests/s: failures", f"{len(failures)}", "0")
        report(f"{len(delays)} short requests meanwhile", f"median {statistics.median(delays):.1f} ms, "
               f"p99 {sorted(delays)[len(delays) * 99 // 100]:.0f} ms")
        report("CPU of the service meanwhile", f"{100 * statistics.median(shares):.0f} % of one core")
        report("end of a job to the next start, meanwhile / before", f"{statistics.median(ratios):.2f}", "<= 2")
        report("service memory before, then meanwhile and after", f"{', '.join(f'{size:.0f}' for size in memory_mb)} MB")
        for failure in failures[:5]:
            print("   ", failure)


class Tap:
    """Counts what goes through a port of its own to the service and back."""

    def __init__(self, port: int) -> None:
        self.count = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, args=(port,), daemon=True).start()

    def accept(self, port: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                ends = self.listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                for here, there in (ends, ends[::-1]):
                    threading.Thread(target=self.pass_on, args=(here, there), daemon=True).start()

    def pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := here.recv(65536):
                self.count += len(piece)
                there.sendall(piece)
            there.shutdown(socket.SHUT_WR)


def measure_page() -> None:
    """What a tab that shows the page sends and receives, by 8 GPUs whose readings change each time."""
    from playwright.sync_api import sync_playwright
    with bench(gpus=8) as it, sync_playwright() as playwright:
        smi = it.folder / "bin" / "nvidia-smi"
        smi.write_text(smi.read_text().replace(" 0, 0, 30, 70.00", " $(($(date +%s) % 97 * 100 + i)), $(date +%S), 6$i, 2$(date +%S).$i"))
        tap = Tap(it.port)
        for number in range(8):
            it.client.add(f"sleep {1000 + number}")
        it.post(2000)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{tap.port}/")
        page.wait_for_selector("#waiting li")

        def count_kb(act: Callable[[], object] = lambda: None) -> float:
            before, cpu, give_up_at = tap.count, it.cpu_s(), time.monotonic() + 60
            while time.monotonic() < give_up_at:
                act()
                page.wait_for_timeout(2000)
            report("a tab: CPU of the service meanwhile", f"{(it.cpu_s() - cpu) / 60 * 100:.1f} % of one core")
            return (tap.count - before) / 1e3

        page.wait_for_timeout(10000)
        report("a tab, 2,000 waiting, 8 running: idle for a minute", f"{count_kb():.0f} KB", "<= 10 KB")
        kb = count_kb(lambda: it.client.add("true", gpus=0))
        report("a tab, 2,000 waiting: a job every 2 s for a minute", f"{kb:.0f} KB", "<= 100 KB")
        browser.close()


def measure_starts(it: Bench, count: int) -> float:
    """The median of the gaps between so many short jobs on one GPU, in ms."""
    stamps = it.folder / f"stamps-{time.perf_counter()}"
    stamps.touch()
    it.client.add_all([f'echo "start $EPOCHREALTIME" >> {stamps}; sleep 0.05; echo "end $EPOCHREALTIME" >> {stamps}'] * (count + 1))
    while stamps.read_text().count("end") <= count:
        time.sleep(0.05)
    times = [float(line.split()[1]) for line in stamps.read_text().splitlines()]
    return statistics.median((times[at + 1] - times[at]) * 1000 for at in range(1, 2 * count, 2))


class Page:
    """What a tab asks for, without a browser: what has changed, 1.5 s after each answer with news."""

    def __init__(self, it: Bench) -> None:
        self.port, self.is_over, self.version, self.count = it.port, False, 0, 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.is_over:
            self.version = json.loads(get(self.port, f"/status?after={self.version}&limit=50"))["state_version"]
            self.count += 1
            time.sleep(1.5)

    def end(self) -> None:
        self.is_over = True
        self.thread.join(60)


def get(port: int, path: str) -> bytes:
    line = http.client.HTTPConnection("127.0.0.1", port)
    line.request("GET", path)
    return line.getresponse().read()


def measure_view(it: Bench, act: Callable[[], object], count: int = 20) -> tuple[float, float]:
    """(the median of its time, the CPU time of the service and of the command), in ms."""
    def cpu_s() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return it.cpu_s() + children.ru_utime + children.ru_stime

    before = cpu_s()
    median = median_ms(act, count)
    return median, (cpu_s() - before) / count * 1000


def list_views(it: Bench) -> dict[str, tuple[float, float]]:
    it.command("install")
    installed = str(it.folder / ".local/bin/nexus")

    def call(*words: str) -> None:
        subprocess.run([installed, *words], env=it.environ, check=True, capture_output=True)

    return {what: measure_view(it, act, count) for what, count, act in (
        ("GET /status?after=0", 20, lambda: get(it.port, "/status?after=0")), ("nexus", 20, call),
        ("GET /queue?limit=50", 20, lambda: get(it.port, "/queue?limit=50")),
        ("GET /queue, the first time", 1, lambda: get(it.port, "/queue")),
        ("GET /queue", 5, lambda: get(it.port, "/queue")), ("nexus queue", 5, lambda: call("queue", "-n", "0")))}


def measure_views() -> None:
    """What is shown of a queue, with 10,000 waiting and with none; and what a page costs while jobs end."""
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for waiting in (0, 2000, 10000):
        with bench(gpus=8) as it:
            for number in range(8):
                it.client.add(f"sleep {1000 + number}")
            it.post(waiting)
            it.await_rest()
            memory_mb = it.rss_mb()
            found[waiting] = list_views(it)
            report(f"service memory, {waiting} waiting: before all are listed, and after", f"{memory_mb:.0f}, {it.rss_mb():.0f} MB")
            shares = []
            for has_page in (False, True):
                page = Page(it) if has_page else None
                time.sleep(3)
                began, used = time.monotonic(), it.cpu_s()
                while time.monotonic() < began + 40:
                    it.client.add("true", gpus=0, priority="high")
                    time.sleep(2)
                shares.append((it.cpu_s() - used) / (time.monotonic() - began) * 100)
                if page:
                    page.end()
            report(f"a page, {waiting} waiting, a job ends every 2 s: CPU of the service",
                   f"{shares[1]:.1f} %, without it {shares[0]:.1f} %", "<= 2 % more")
    for name in found[0]:
        (none, none_cpu), (many, many_cpu) = found[0][name], found[10000][name]
        limit = "<= 1000 ms" if "queue" in name and "limit" not in name else "<= 20 ms more"
        report(f"{name}: 10,000 waiting / none", f"{many:.0f} / {none:.0f} ms, CPU {many_cpu:.0f} / {none_cpu:.0f} ms", limit)


# A start, and another's add and kill, beside what one user's token may ask for

Ask = Callable[..., object]                 # (method, path, body) as the user bob; with is_checked=False whatever the answer is


def add_many(ask: Ask, count: int = 9000, **fields: object) -> list[str]:
    return ask("POST", "/queue", [{"command": "true", "name": f"j{n}", **fields} for n in range(count)])["ids"]  # type: ignore


def beside_long_filters(it: Bench, ask: Ask) -> Iterator[None]:
    add_many(ask, 3000)
    yield
    for body in ({"since": "1d" * 100000}, {"status": ["failed"] * 1000000}, {"text": "x" * 4000000}, {"name": "*a" * 1000000}):
        ask("POST", "/jobs/dismiss", body, is_checked=False)


def beside_add(it: Bench, ask: Ask) -> Iterator[None]:
    yield
    add_many(ask)


def beside_linked(it: Bench, ask: Ask) -> Iterator[None]:
    parents = add_many(ask, 100)
    yield
    ask("POST", "/queue", [{"command": "true", "after": parents}] * 9000, is_checked=False)
    ask("POST", "/queue", [{"command": "true", "after": parents}] * 900)
    ask("POST", "/jobs/cancel", {"ids": parents})


def beside_change(it: Bench, ask: Ask) -> Iterator[None]:
    ids = add_many(ask)
    yield
    for change in ({"name": "y"}, {"gpus": 0.5}, {"group": "g"}, {"env": {"A": "b"}}):
        ask("PATCH", "/queue", {"ids": ids, "change": change})


def beside_cancel(it: Bench, ask: Ask) -> Iterator[None]:
    ids = add_many(ask, group="g")
    yield
    ask("POST", "/jobs/cancel", {"ids": ids})
    ask("POST", "/jobs/retry", {"group": "g", "status": "cancelled"})
    ask("POST", "/jobs/clear", {"group": "g", "status": "cancelled"})


def beside_empty_lists(it: Bench, ask: Ask) -> Iterator[None]:
    yield
    for size in (2500000, 20000000):
        ask("POST", "/jobs/cancel", b'{"ids": [[]' + b",[]" * size + b"]}", is_checked=False)


def hold(it: Bench, count: int, requests: Callable[[int], bytes], drip: bytes = b"", time_s: float = 10.0) -> None:
    """Keep so many connections, with a request each, and read what comes; each second, those that are closed are opened anew."""
    lines: dict[int, socket.socket] = {}
    poll, give_up_at, acted_at = select.poll(), time.monotonic() + time_s, 0.0
    while time.monotonic() < give_up_at:
        is_due = time.monotonic() > acted_at + 1
        acted_at = time.monotonic() if is_due else acted_at
        while is_due and len(lines) < count:
            line = socket.create_connection(("127.0.0.1", it.port))
            line.sendall(requests(len(lines)))
            lines[line.fileno()] = line
            poll.register(line, select.POLLIN)
        for handle, _ in poll.poll(100):
            with contextlib.suppress(OSError):
                if lines[handle].recv(262144):
                    continue
            poll.unregister(handle)
            lines.pop(handle).close()
        for line in lines.values() if drip and is_due else ():
            with contextlib.suppress(OSError):
                line.send(drip)
    for line in lines.values():
        line.close()


def beside_forms(it: Bench, ask: Ask) -> Iterator[None]:
    """As through a proxy, where the kernel does not tell whose they are; bob has his token, and is served at once."""
    yield
    form = (b"POST /api/submit HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 192.0.2.1\r\nContent-Length: %d\r\n"
            b"Content-Type: multipart/form-data; boundary=B\r\n\r\n--B\r\n")
    holding = threading.Thread(target=hold, args=(it, 256, lambda number: form % (9000, 9000000)[number % 2], b"x"))
    holding.start()
    times = []
    while holding.is_alive():
        began = time.perf_counter()
        ask("POST", "/queue", {"command": "true"})
        times.append(time.perf_counter() - began)
        time.sleep(0.1)
    report("an add of a user with a token, beside 256 slow forms of others", f"{max(times):.2f} s at most, of {len(times)}", "<= 0.3 s")


def beside_held(it: Bench, ask: Ask) -> Iterator[None]:
    """250 of one user, of each kind of request that is held."""
    job = ask("POST", "/queue", {"command": "while sleep 0.01; do seq 100; done", "gpus": 0})["id"]        # type: ignore
    add_many(ask, 2000)
    yield
    for path in ("/jobs/{}/logs?follow=true", "/jobs/{}?wait=60", "/status?after=0"):
        request = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path.format(job).encode(), it.bob)
        hold(it, 250, lambda number: request)                   # noqa: B023


BESIDE = {"filters that are too long": beside_long_filters, "an add of 9,000": beside_add, "900,000 links, and 90,000": beside_linked,
          "changes of 9,000": beside_change, "a cancel of 9,000, their retry and clear": beside_cancel,
          "bodies of empty lists": beside_empty_lists, "256 slow forms of somebody unknown": beside_forms,
          "250 requests that are held": beside_held}


def start_one(it: Bench) -> tuple[float, float, float]:
    """Seconds until the owner's add is answered, until the command has begun, and until its kill is over."""
    stamp = it.folder / f"started-{time.perf_counter()}"
    began = time.perf_counter()
    job = it.client.add(f"touch {stamp}; sleep 600", gpus=0)
    added = time.perf_counter()
    while not stamp.exists():
        time.sleep(0.002)
    started = time.perf_counter()
    it.client.cancel(ids=[job])
    it.client.wait([job])
    return added - began, started - began, time.perf_counter() - started


def measure_beside() -> None:
    """What one user asks for, beside the owner's start, add and kill: the longest of each, and how much longer than alone."""
    for what, act in BESIDE.items():
        with bench(launcher="direct") as it:
            token = subprocess.run([sys.executable, str(TOP / "nexus.py"), "token", "create", "bob"], env=it.environ, check=True,
                                   capture_output=True, text=True).stdout.split()[-1]
            it.bob = f"Authorization: Bearer {token}\r\n".encode()

            def ask(method: str, path: str, body: object, is_checked: bool = True) -> object:
                line = http.client.HTTPConnection("127.0.0.1", it.port)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}      # noqa: B023
                with contextlib.suppress(OSError):                          # refused before all of it was sent
                    line.request(method, path, content, headers)
                answer = line.getresponse()
                text = answer.read()
                assert answer.status < 300 or not is_checked, text
                return json.loads(text)

            it.client.add("sleep 3600")                                     # on the one GPU, for which bob's jobs wait
            steps = act(it, ask)
            next(steps)
            it.await_rest()
            alone = [max(column) for column in zip(*(start_one(it) for _ in range(5)))]
            began, asking = time.perf_counter(), threading.Thread(target=lambda: list(steps))   # noqa: B023
            asking.start()
            found = [start_one(it)]
            while asking.is_alive():
                found.append(start_one(it))
            took = time.perf_counter() - began
            more = [max(column) - before for column, before in zip(zip(*found), alone)]
            report(f"beside {what} ({took:.1f} s, {len(found)} starts)",
                   f"add {more[0]:+.2f}, start {more[1]:+.2f}, kill {more[2]:+.2f} s", "<= +0.3 s each")


def measure_fair() -> None:
    """Users of one box who have services of their own, beside the nexus that knew no turns."""
    fair.main(["5d9180f"])


MEASURES = {"plan": measure_plan, "gap": measure_gap, "crowd": measure_crowd, "add": measure_add, "bulk": measure_bulk,
            "idle": measure_idle, "load": measure_load, "page": measure_page, "views": measure_views, "beside": measure_beside,
            "fair": measure_fair}


def main() -> None:
    if set(sys.argv[1:]) - set(MEASURES):
        sys.exit(f"usage: bench.py [{' | '.join(MEASURES)}] ...")
    for name in sys.argv[1:] or MEASURES:
        MEASURES[name]()


if __name__ == "__main__":
    main()

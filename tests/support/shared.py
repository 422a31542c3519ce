"""One service that the tests of a file use, one after another; each finds it as the first one did.

    @pytest.fixture(scope="module")
    def service():
        with shared.Service(gpus=2, launcher="screen") as made:
            yield made

    @pytest.fixture
    def box(service):
        with service.lend() as box:
            yield box

A test may kill, stop and reconfigure it, and leave files in its folder and jobs that run.  Whatever cannot be made good ends that
service, fails the test, and the next test gets a new one.
"""

import contextlib
import importlib.util
import shutil
import sys

import live

FINAL = ("completed", "failed", "cancelled")


class Service:
    """A live.Box made by need."""

    def __init__(self, **options):
        self.options, self.box = options, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        box, self.box = self.box, None
        if box:
            box.close()

    @contextlib.contextmanager
    def lend(self):
        if not self.box:
            self.box = live.Box(**self.options)
            self.settings = dict(self.box.settings)
            self.files = {*self.box.folder.iterdir(), *self.box.bin.iterdir()}
        box = self.box
        try:
            yield box
            print(f"---- service.log of {box.folder}\n{box.log()[-4000:]}")         # shown where the test has failed
            self.clean()
        except BaseException:
            self.close()
            raise

    def clean(self):
        """End and forget all that a test has left, and check that nothing is."""
        box = self.box
        if box.settings != self.settings:
            if box.pid():
                box.kill_all_of_service()
            box.settings = dict(self.settings)
            box.write_config()
        if not isinstance(gpus := self.options.get("gpus", 2), int):
            box.show(gpus)
        if not box.pid():
            box.start()
        box.ask("POST", "/service/resume")
        for status in ("pending", "running"):
            box.ask("POST", "/jobs/cancel", {"status": status})
        live.until(lambda: not box.ask("GET", "/jobs?status=running"), lambda: f"the end of {box.ask('GET', '/jobs?status=running')}")
        for status in FINAL:
            box.ask("POST", "/jobs/clear", {"status": status})
        assert not box.ask("GET", "/jobs")
        for gpu in box.status()["gpu_status"]:
            if gpu["is_paused"]:
                box.ask("POST", f"/gpus/{gpu['place']}/resume")
        live.until(lambda: not find_runs(box), lambda: f"the end of {find_runs(box)}")
        for path in {*box.folder.iterdir(), *box.bin.iterdir()} - self.files - {box.folder / "leases"}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for path in box.home.glob("*.damaged-*"):
            path.unlink()


@contextlib.contextmanager
def services_of_two_users(**options):
    """Services of two users of this machine, who agree by their leases."""
    with contextlib.ExitStack() as stack:
        tools = live.Tools()
        stack.callback(tools.close)
        made = []
        for _ in range(2):
            user = live.User(tools)
            stack.callback(user.remove)
            made.append(stack.enter_context(Service(user=user, lease_dir=str(tools.folder / "shared" / "leases"), **options)))
        yield made


def find_runs(box):
    """The processes of its jobs."""
    found = {pid: live.read_bytes(f"/proc/{pid}/cmdline") for pid in live.find_processes(f"{box.folder}/")}
    return {pid: words for pid, words in found.items()
            if b"/job.sh" in words or b"NEXUS_JOB_ID=" in live.read_bytes(f"/proc/{pid}/environ")}


CHANGED = """\
# nexus.py as it is compiled already: Python would take a second for all of it
import marshal
with open({compiled!r}, "rb") as file:
    exec(marshal.loads(file.read()[16:]))
{change}
"""


def write_program(program, change=""):
    """Another nexus.py, which does the same but for what this Python changes at its end."""
    program.write_text(CHANGED.format(compiled=importlib.util.cache_from_source(str(live.NEXUS)), change=change))


def give_program(box):
    """Have the commands of a box run a nexus.py of its own, which the test may change; its path."""
    program = box.path("nexus.py")
    shutil.copy2(live.NEXUS, program)
    shutil.copy(live.COMMAND, box.path("nexus"))
    compiled = importlib.util.cache_from_source(str(program))
    box.path("__pycache__").mkdir()
    with contextlib.suppress(FileNotFoundError):        # where Python writes no compiled files
        shutil.copy(importlib.util.cache_from_source(str(live.NEXUS)), compiled)
    box.argv = lambda *words: [sys.executable, str(box.path("nexus")), *words]
    return program


def crash(box, count=1):
    """SIGKILL to the service, so often; its supervisor is spared the pauses, which grow.  The new service's pid."""
    shell, = box.shells()
    for _ in range(count):
        old = box.kill_service()

        def find_new(old=old):
            for pid in live.read(f"/proc/{shell}/task/{shell}/children").split():
                if live.read_bytes(f"/proc/{pid}/cmdline").startswith(b"sleep\0"):
                    live.kill(int(pid))
            return box.pid() not in (None, old)
        live.until(find_new, "the supervisor to start it again", interval_s=0.05)
    return box.await_service()

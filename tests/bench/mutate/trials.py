"""Trials: work in a fork of this process, and pytest in it."""
from __future__ import annotations

import gc
import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from joined import Joined
from mutants import TOP

PER_CPU_S = 15.0                # seconds that may pass for each second of CPU: others may use it
WARM = ("greenlet", "hypothesis", "_hypothesis_pytestplugin", "psutil", "xdist.plugin")


def warm_up(joined: Joined) -> None:
    """Import what the tests and nexus.py will, so that no trial has to."""
    names = {*WARM, *re.findall(r"^ *(?:import|from) ([a-z][\w.]*)", "\n".join(joined.lines), re.MULTILINE)}
    for name in sorted(names):
        if name.split(".")[0] in sys.stdlib_module_names or name in WARM:
            try:
                importlib.import_module(name)
            except ImportError:
                pass
    sys.path[:0] = [str(TOP / "tests/support"), str(TOP / "tests/sim")]
    gc.collect()
    gc.freeze()


def fork(work: Callable[[], Any], cpu_s: float, log: str = os.devnull) -> tuple[Any, float]:
    """(what `work` returns in a child, its CPU seconds); (None, …) when it died or took more than `cpu_s`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 6))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode()[:60000])
        os._exit(0)
    os.close(writer)
    began, body = time.monotonic(), b""
    try:
        while (left := began + cpu_s * PER_CPU_S - time.monotonic()) > 0:
            if not select.select([reader], [], [], left)[0] or not (more := os.read(reader, 65536)):
                break
            body += more
    finally:
        os.close(reader)
        try:
            os.killpg(pid, signal.SIGKILL)                  # it, and all that it has left
        except ProcessLookupError:                          # it has not got so far
            os.kill(pid, signal.SIGKILL)
        usage = os.wait4(pid, 0)[2]
    return (json.loads(body) if body else None), usage.ru_utime + usage.ru_stime


def get_function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def run_pytest(words: Sequence[str], plugin: object) -> int:
    """Run pytest in this process; its folder for temporary files is removed."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(TOP)
    folder = tempfile.mkdtemp(prefix="mutate-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    try:
        return int(pytest.main([
            "-q", "-c", str(TOP / "setup.cfg"), "--rootdir", str(TOP), "--basetemp", f"{folder}/tests",
            "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "_hypothesis_pytestplugin",
            "-p", "xdist.plugin", "-W", "ignore::pytest.PytestAssertRewriteWarning", "--tb", "native",
            *words], [plugin]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)

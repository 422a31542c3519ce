"""A model of job.sh: what it does, in steps, any of which may be the last or be slow.

test_stand_ins.py compares it with the real one, stopped after each of these steps.
"""
from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import nexus

if TYPE_CHECKING:
    from world import SimProcess

FULL_PAUSE_S = 2.0              # between two tries to write the result on a full disk


class Settings:
    """The assignments at the top of a job.sh."""

    def __init__(self, text: str) -> None:
        words = dict(re.findall(r"(?m)^([a-z_]+)=(.*)$", text.partition("command_of_the_job()")[0]))
        single = {name: "".join(split_words(word)) for name, word in words.items() if not word.startswith(("(", '"$'))}
        several = {name: split_words(word[1:-1]) for name, word in words.items() if word.startswith("(")}
        self.folder, self.job_id, self.key, self.events, self.cwd = (single[name] for name in ("dir", "id", "key", "events", "cwd"))
        self.recorder, self.service_id = int(single["recorder"]), single.get("service_id", "")
        self.leases = list(map(int, several["leases"]))
        self.lease_files, self.lease_handles = several["lease_files"], several["lease_handles"]

    @staticmethod
    def read(disk: nexus.Disk, script: str) -> Settings:
        """Raises: OSError, also for one of which a power cut has left a part."""
        text = nexus.read_whole(disk, script).decode()
        if not text.endswith(nexus.JOB_SCRIPT):
            raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC), script)
        return Settings(text)


def split_words(text: str) -> list[str]:
    """The words of a shell; few of them are quoted."""
    return shlex.split(text) if "'" in text else text.split()


def write_file(process: SimProcess, path: str, text: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> None:
    """`printf > file`.  Raises: OSError."""
    handle = process.disk.open(path, flags)
    try:
        process.disk.pwrite(handle, text.encode(), 0)
    finally:
        process.disk.close(handle)


def write_anew(process: SimProcess, path: str, text: str) -> None:
    """`make_way "$file" && printf > "$file"`.  Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        process.disk.unlink(path)
    write_file(process, path, text)


def append(process: SimProcess, path: str, text: str) -> int:
    """`printf >> file`; return how much the disk took.  Raises: OSError."""
    handle = process.disk.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        return process.disk.pwrite(handle, text.encode(), process.disk.size(handle))
    finally:
        process.disk.close(handle)


def say(process: SimProcess, settings: Settings, *words: object) -> None:
    """A line in the FIFO; without a reader it is gone."""
    events = process.host.fifos.get(settings.events)
    if events and events.process.is_alive:
        events.queue.append(" ".join(map(str, words)).encode())


def hold_leases(process: SimProcess, settings: Settings) -> bool:
    """Share the locks on the GPUs' lease files: those that were inherited, or those of the service's open files."""
    for path, place in zip(settings.lease_files, settings.lease_handles):
        _, _, pid, _, handle = place.split("/")
        service = process.host.processes.get(int(pid))
        opened = service.handles.get(int(handle)) if service else None
        if opened is None:
            return False
        from disk import OpenFile
        own = process.add_handle(OpenFile(opened.file), 10)
        settings.leases.append(own)
        try:
            is_same = process.disk.look_up(path) is opened.file
        except OSError:
            is_same = False
        if not (process.disk.lock(own, is_shared=True) and is_same):
            return False
        if opened.file.content.decode().partition(" ")[0] != settings.service_id:
            return False
    return True


def release_leases(process: SimProcess, settings: Settings) -> None:
    for handle in settings.leases:
        process.disk.close(handle)
    settings.leases = []


def run_job(process: SimProcess, settings: Settings, job: nexus.Job, mark: str, home: str,
            is_slurm: bool = False) -> Iterator[str]:
    """Each `yield` comes after a step, with its name.  Killed at one, it does nothing more."""
    from command import Command
    from world import Run, SimProcess
    host, folder, number, job_id = process.host, settings.folder, job.attempt, settings.job_id
    claim = f"{folder}/attempt-{number}"

    def finish(code: object, took_cs: int, cause: str = "", words: str = "", goes_on: bool = False) -> Iterator[str]:
        is_cut = False
        while True:
            try:
                if cause:
                    write_anew(process, f"{folder}/fault-{number}", words + "\n")
                path = f"{folder}/result-{number}.json"
                write_anew(process, path, "")
                yield "result opened"
                more = "".join([f', "cause": "{cause}"' if cause else "", ', "goes_on": true' if goes_on else "",
                                ', "is_cut": true' if is_cut else ""])
                text = (f'{{"exit_code": {code}, "runtime_seconds": {took_cs // 100}.{took_cs % 100:02d}, '
                        f'"key": "{settings.key}"{more}}}\n')
                write_file(process, path, text)
                if settings.recorder not in host.processes:
                    handle = process.disk.open(path, os.O_RDONLY)
                    process.disk.fsync(handle)
                    process.disk.close(handle)
                yield "result written"
                return
            except OSError:
                is_cut = True
                until = process.world.now + FULL_PAUSE_S
                while process.world.now < until:
                    yield "waiting for room"
                try:
                    process.disk.stat(folder)
                except OSError:
                    return
                say(process, settings, "end", job_id, number, code, took_cs, 1)

    def refuse(cause: str, words: str) -> Iterator[str]:
        release_leases(process, settings)
        if cause == "bounce":
            say(process, settings, "bounce", job_id, number, words)
        else:
            try:
                said = f"nexus: {words}\n"
                process.world.note_printed(job_id, 1, said.encode()[:append(process, f"{folder}/stderr.log", said)])
            except OSError:
                pass
        yield from finish("null", 0, cause, words)

    yield "forked"
    try:
        handle = process.disk.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        if error.errno != errno.EEXIST:
            say(process, settings, "fail", job_id, number, f"the log folder {folder} cannot be written")
        return
    yield "claim made"
    try:
        process.disk.pwrite(handle, f"{process.pid} {process.started} {settings.key}\n".encode(), 0)
    except OSError:
        say(process, settings, "fail", job_id, number, f"the log folder {folder} cannot be written")
        return
    process.disk.close(handle)
    yield "claimed"
    try:
        owner = nexus.read_whole(process.disk, claim).decode().split("\n")[0]
    except OSError:
        owner = ""
    if owner != f"{process.pid} {process.started} {settings.key}":
        return
    if not hold_leases(process, settings):
        yield from refuse("bounce", "a GPU lease was lost before its job began")
        return
    yield "leases held"
    try:
        append(process, claim, f"{host.uptime_cs()}\n")
    except OSError:
        say(process, settings, "fail", job_id, number, f"the log folder {folder} cannot be written")
        return
    yield "begun"
    say(process, settings, "start", job_id, number, process.pid, process.started, host.uptime_cs())
    yield "start said"
    try:
        process.disk.stat(settings.cwd)
    except OSError:
        words = f"the directory {settings.cwd} cannot be entered; make it again, or add the job with --cwd"
        yield from refuse("launch", words)
        return
    try:
        for name in nexus.STREAM_FILES:
            process.disk.close(process.disk.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT))
    except OSError:
        yield from refuse("launch", f"the log files in {folder} cannot be written")
        return
    yield "logs opened"
    begin_cs = host.uptime_cs()
    command = SimProcess(host, "python", process.pid, process.session, mark=mark)
    for handle in settings.leases:
        command.add_handle(process.handles[handle], handle)
    command.command = Command(job.command.split()[1:], process.world)
    run = Run(job, folder, command, process, home)
    process.world.begin_run(run)
    try:
        said = f"run {job_id} {number}\n"
        process.world.note_printed(job_id, 0, said.encode()[:append(process, f"{folder}/stdout.log", said)])
    except OSError:
        pass
    while command.is_alive:
        yield "command runs"
    code = run.code = command.exit_code
    yield "command ended"
    took_cs = host.uptime_cs() - begin_cs
    release_leases(process, settings)
    say(process, settings, "end", job_id, number, code, took_cs)
    yield "end said"

    def find_company() -> bool:
        return any(one.session == process.session and one is not process for one in host.processes.values())

    goes_on = not is_slurm and find_company()       # Slurm ends with a job what it left
    yield from finish(code, took_cs, goes_on=goes_on)
    if goes_on:
        while find_company():
            yield "others go on"
        took_cs = host.uptime_cs() - begin_cs
        yield from finish(code, took_cs)
        say(process, settings, "end", job_id, number, code, took_cs)
    yield "done"

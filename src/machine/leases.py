"""Leases: the files by which the services of several users agree on GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from ..values.config import GpuConfig
from ..values.errors import NexusError
from ..values.text import format_line
from .clock import wait_until
from .disk import Disk, disk_errors, find_status, find_user, is_folder, open_file
from .processes import PROC

LEASE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
LEASE_TIMEOUT_S = 0.003         # another service that only looks keeps a file locked for much less
LEASE_TOUCH_S = 3600.0          # more often than cleaners of /tmp run


FIRST_LEASE = 10            # the least handle of a lease: job.sh uses those below for itself


class Leases:
    """Which user's service has which GPU, without root and without a common service.

    Each GPU has a file in a folder that everybody may write.  Whoever has the GPU keeps a shared lock on it: the
    service until the job's runner does, then the runner and its children.  The text names the service and its user.
    Only who can lock the file alone writes it: so one of two services has the GPU; jobs of one service may share it.
    Anybody can put anything there.  So no other file is looked at, nothing waits for a file, and no link is followed.
    """

    def __init__(self, disk: Disk, folder: str, service_id: str) -> None:
        self.disk, self.folder, self.service_id, self.user = disk, folder, service_id, find_user(os.geteuid())
        self.held: dict[str, list[tuple[str, int]]] = {}    # {job id: files and descriptors}, until its runner has them
        self.kept: dict[str, int] = {}                      # {GPU uuid: descriptor}, where a running job lost its lock
        self.lost: list[str] = []                           # the GPUs of which the last look found that
        self.holders: Mapping[str, str] = {}                # as the last look found them

    def find_holders(self, uuids: Iterable[str], used: Container[str] = ()) -> dict[str, str]:
        """{GPU uuid: user} of those GPUs that other services have.  Raises: unavailable.

        `used`: those that running jobs have here.  When somebody has removed the file that a runner has locked, this
        service locks the new one, and keeps it.
        """
        holders, self.lost = {}, []
        with self.opened_folder() as folder:
            for uuid in uuids:
                # Of one that others had, it is not waited for who only looks: the next look will tell.
                handle, holder = self.lock(folder, uuid, 0.0 if uuid in self.holders else LEASE_TIMEOUT_S)
                if handle is None:
                    holders[uuid] = holder
                elif uuid in used and holder != "shared":
                    self.drop(uuid)                     # that file is gone, too
                    self.kept[uuid] = handle
                    self.lost += [uuid] if holder == "new" else []
                else:
                    self.disk.close(handle)
        self.holders = holders
        return holders

    def drop(self, uuid: str) -> None:
        """Give up a lock that was kept."""
        handle = self.kept.pop(uuid, None)
        if handle is not None:
            self.disk.close(handle)

    def take(self, job_id: str, uuids: Sequence[str]) -> None:
        """Take GPUs for a job, all or none.  Raises: conflict, naming the holder; unavailable."""
        self.close_own(job_id)
        files = self.held[job_id] = []
        try:
            with self.opened_folder() as folder:
                for uuid in uuids:
                    handle, holder = self.lock(folder, uuid)
                    if handle is None:
                        raise NexusError("conflict", f"the nexus of {holder} took {uuid} first")
                    handle = self.disk.renumber(handle, FIRST_LEASE)
                    files.append((os.path.join(self.folder, name_lease(uuid)), handle))
        except BaseException:
            self.close_own(job_id)
            raise

    def paths(self, job_id: str) -> list[tuple[str, str, str]]:
        """Of each GPU: its file, the path by which job.sh opens it, and the service that it must name.

        The second path is that of an open file, which nobody can replace.
        """
        return [(path, f"{PROC}/{os.getpid()}/fd/{handle}", self.service_id) for path, handle in self.held[job_id]]

    def handles(self, job_id: str) -> list[int]:
        """The handles of a job's locked files.  A child that gets them has the locks."""
        return [handle for _, handle in self.held[job_id]]

    def close_own(self, job_id: str) -> None:
        """Close this service's descriptors for a job: from then on the locks are its runner's alone."""
        for _, handle in self.held.pop(job_id, ()):
            self.disk.close(handle)

    @contextlib.contextmanager
    def opened_folder(self) -> Iterator[int]:
        """The folder's descriptor.  Raises: unavailable, when it is not safe."""
        import stat
        with disk_errors("make", self.folder), contextlib.suppress(FileExistsError):
            if not find_status(self.disk, self.folder, is_followed=False):
                self.disk.mkdir(self.folder, 0o1700)
        with disk_errors("use", self.folder), open_file(self.disk, self.folder,
                                                        os.O_DIRECTORY | os.O_NOFOLLOW) as folder:
            status = self.disk.stat(folder)
            if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o1700:
                self.disk.chmod(folder, 0o1777)     # it is new, or its maker was killed before this
            elif status.st_mode & 0o1002 != 0o1002:
                raise NexusError("unavailable", f"{self.folder}, where users' services agree on GPUs, is not a folder "
                                 "that all may write with the sticky bit",
                                 hint=f"chmod 1777 {self.folder}, or set [gpu] lease_dir in config.toml")
            yield folder

    def lock(self, folder: int, uuid: str, timeout_s: float = LEASE_TIMEOUT_S) -> tuple[int | None, str]:
        """(a GPU's file, locked for this service; how: sign()), or (None, who has the GPU).  Raises: OSError."""
        import stat
        name = name_lease(uuid)
        try:
            status = self.disk.stat(name, folder, is_followed=False)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):      # fs.protected_regular refuses O_CREAT on another's file
                self.disk.close(self.disk.open(name, LEASE_FLAGS | os.O_CREAT | os.O_EXCL, folder=folder))
            status = self.disk.stat(name, folder, is_followed=False)
        blocked = f"(who put something else at {self.folder}/{name})"
        try:
            handle = self.disk.open(name, LEASE_FLAGS, folder=folder)
        except OSError:                             # no file, or its owner keeps others out
            return None, f"{find_user(status.st_uid)} {blocked}"
        with contextlib.ExitStack() as stack:
            stack.callback(self.disk.close, handle)
            status = self.disk.stat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                return None, f"{find_user(status.st_uid)} {blocked}"
            if (status.st_uid, stat.S_IMODE(status.st_mode), status.st_size) == (os.geteuid(), 0o600, 0):
                self.disk.chmod(handle, 0o666)      # it is new, or its maker was killed before this
            if time.time() - status.st_mtime > LEASE_TOUCH_S:
                self.disk.touch(handle)
            how = wait_until(lambda: self.sign(handle), timeout_s, 0.001)
            if how:
                stack.pop_all()
                return handle, how
            is_lease = self.disk.lock(handle, is_shared=True)
            return None, self.read(handle)[1] if is_lease else f"somebody (who keeps {self.folder}/{name} locked)"

    def sign(self, handle: int) -> str:
        """Lock a GPU's file for this service, unless another service has: then "".  Raises: OSError.

        How it was: `shared`, locked by this service or its jobs; `free`, with its text; `new`, without that.
        """
        how = "free" if self.disk.lock(handle) else "shared"
        if how == "free" and self.read(handle) != (self.service_id, self.user):         # nobody has the GPU
            self.disk.pwrite(handle, f"{self.service_id} {self.user}\n".encode(), 0)
            how = "new"
        # Between both locks another service may come first: then the text is that one's.
        is_own = self.disk.lock(handle, is_shared=True) and self.read(handle)[0] == self.service_id
        return how if is_own else ""

    def read(self, handle: int) -> tuple[str, str]:
        """(the service in a GPU's file, its user)"""
        text = self.disk.pread(handle, 200, 0).decode("utf-8", "replace")
        service_id, _, user = text.partition("\n")[0].partition(" ")
        return service_id, format_line(user, 60) or "somebody"


def name_lease(uuid: str) -> str:
    return re.sub(r"[^\w.-]", "_", uuid)


def find_lease_folder(disk: Disk, config: GpuConfig) -> str:
    shared = "/run/lock" if is_folder(disk, "/run/lock") and disk.stat("/run/lock").st_mode & 0o002 else "/tmp"
    return os.path.abspath(os.path.expanduser(config.lease_dir or f"{shared}/nexus-leases"))

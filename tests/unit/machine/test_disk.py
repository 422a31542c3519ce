"""Writing that survives a crash, reading what may be torn.  On a real folder."""

import contextlib
import errno
import functools
import logging
import os
import socket

import pytest

import nexus

DISK_ERRORS = [  # what the disk says, part of the advice
    (errno.EPERM, "export NEXUS_HOME=FOLDER"), (errno.EOPNOTSUPP, "export NEXUS_HOME=FOLDER"), (errno.EACCES, "ls -ld"),
    (errno.ENOTDIR, "ls -ld"), (errno.ENOSPC, "make room"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"),
]


@pytest.mark.parametrize("number, advice", DISK_ERRORS, ids=[errno.errorcode[number] for number, _ in DISK_ERRORS])
def test_what_helps_against_an_error_of_the_disk(number, advice):
    error = nexus.describe_disk_error(OSError(number, "it says no"), "make", "/x/api.sock")
    assert error.message == "cannot make /x/api.sock: it says no" and advice in error.hint


DISK = nexus.Disk()


# A disk of one's own


class Elsewhere(nexus.Disk):
    """A disk that has /nowhere, which is a folder of the test's."""

    def __init__(self, folder):
        for name in [name for name in vars(nexus.Disk) if not name.startswith("_")]:
            setattr(self, name, functools.partial(self.act, getattr(self, name), str(folder)))

    def act(self, operation, place, *given, **named):
        return operation(*(each.replace("/nowhere", place, 1) if isinstance(each, str) else each for each in given), **named)


def test_what_the_service_keeps_is_on_the_disk_that_it_is_given(tmp_path):
    """So a simulation can have one of its own: nothing is read or written beside it."""
    disk, log = Elsewhere(tmp_path), logging.Logger("test")
    log.addHandler(logging.NullHandler())
    layout = nexus.make_layout("/nowhere/home", nexus.Config())
    nexus.secure_folders(disk, layout)
    for step in range(3):
        store = nexus.Store(layout, nexus.Clock(), disk, log)
        store.recover()
        assert len(store.state.seen) == step and bool(store.state.damage) == (step == 2)
        store.update(lambda _, step=step: [nexus.Put("seen", f"{step}" * 16, 1)])
        store.save_checkpoint()
        store.journal.close()
        if step:
            (tmp_path / "home/state.json").write_text("{")
    folder = layout.job_folder("abc")
    assert nexus.take_claim(disk, folder, "abc-1-1") == nexus.read_claim(disk, folder, "abc-1-1") == nexus.OUR_CLAIM
    nexus.append_log(disk, f"{folder}/stdout.log", b"one\ntwo\n", 0)
    reader = nexus.LogReader(disk, folder)
    reader.begin((), (0, 0), 1)
    assert [entry.content for entry in reader.read()] == [b"two\n"] and nexus.measure_logs(disk, folder) == (8, 0)
    nexus.remove_job_files(disk, layout.log_dir, folder)
    leases = [nexus.Leases(disk, "/nowhere/leases", f"0-{letter * 8}") for letter in "ab"]
    leases[0].take("abc", ["GPU-1"])
    assert leases[1].find_holders(["GPU-1"]) and os.listdir(tmp_path / "leases") == ["GPU-1"]
    leases[0].close_own("abc")
    lock = nexus.take_lock(disk, layout.lock_file)
    assert nexus.is_locked(disk, layout.lock_file) and nexus.take_lock(disk, layout.lock_file) is None
    disk.close(lock)
    nexus.change_tokens(disk, layout.tokens_file, lambda tokens: nexus.add_token(tokens, "bob", "secret-of-bob", None, 0))
    assert [token.user for token in nexus.read_tokens(disk, layout.tokens_file).values()] == ["bob"]
    assert not os.path.exists("/nowhere") and os.listdir(tmp_path / "home/logs") == []


# Whole files


@pytest.mark.parametrize("pieces, mode, content", [(["n", "ew"], 0o600, b"new"), (["echo '\udcff\u00e9'"], 0o700, b"echo '\xff\xc3\xa9'")])
def test_write_atomic_replaces_the_file(tmp_path, pieces, mode, content):
    """Bytes that are no text stay; and nobody else reads it."""
    path = tmp_path / "state.json"
    path.write_text("old")
    nexus.write_atomic(DISK, str(path), pieces, mode)
    assert path.read_bytes() == content and path.stat().st_mode & 0o777 == mode and os.listdir(tmp_path) == ["state.json"]


def pieces_that_fail():
    yield "half of it"
    raise KeyboardInterrupt


WRITE_FAULTS = [  # reason, pieces, how it is broken, exception
    ("the writer is interrupted", pieces_that_fail, None, KeyboardInterrupt),
    ("a piece cannot be encoded", lambda: ["\ud800"], None, UnicodeEncodeError),
    ("the disk refuses at the sync", lambda: ["new"], "fsync", nexus.NexusError),
    ("the rename fails", lambda: ["new"], "replace", nexus.NexusError),
]


@pytest.mark.parametrize("reason, pieces, broken, exception", WRITE_FAULTS, ids=[case[0] for case in WRITE_FAULTS])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, reason, pieces, broken, exception):
    path = tmp_path / "state.json"
    path.write_text("old")

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    if broken:
        monkeypatch.setattr(DISK, broken, refuse)
    with pytest.raises(exception):
        nexus.write_atomic(DISK, str(path), pieces())
    monkeypatch.undo()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.json"]


def is_there(path):
    path.write_text("text")


def is_a_link(path):
    path.with_name("other").write_text("text")
    path.symlink_to("other")


def is_open_to_all(path):
    path.write_text("text")
    path.chmod(0o622)


def is_a_fifo(path):
    os.mkfifo(path)


THERE = [  # reason, what is there, whether it is written
    ("it is there", is_there, False), ("it is not", lambda _: None, True), ("another text", lambda path: path.write_text("tex"), True),
    ("others may change it", is_open_to_all, True), ("it may be another's", is_a_link, True), ("it is no file", is_a_fifo, True),
]


@pytest.mark.parametrize("reason, make, is_written", THERE, ids=[case[0] for case in THERE])
def test_what_is_there_needs_no_room(tmp_path, monkeypatch, reason, make, is_written):
    path = tmp_path / "supervisor.sh"
    make(path)
    real_open = DISK.open

    def refuse(path, flags, *mode, **where):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_open(path, flags, *mode, **where)

    monkeypatch.setattr(DISK, "open", refuse)
    with pytest.raises(nexus.NexusError) if is_written else contextlib.nullcontext():
        nexus.write_if_changed(DISK, str(path), "text")
    monkeypatch.undo()
    nexus.write_if_changed(DISK, str(path), "text")
    assert path.read_text() == "text" and not path.is_symlink() and not path.stat().st_mode & 0o022


# Files that are named in the configuration, or that anybody with a home may exchange

def make_huge(path):
    with open(path, "wb") as file:
        file.truncate(20 * 2**30)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD_FILES = [  # reason, what makes the file
    ("a FIFO", os.mkfifo), ("endless", lambda path: path.symlink_to("/dev/zero")), ("a folder", os.mkdir),
    ("huge", make_huge), ("a socket", make_socket), ("a terminal", lambda path: path.symlink_to("/dev/ptmx")),
]
READERS = [  # what is read, the file's name, what reads it
    ("the configuration", "config.toml", lambda layout, path: nexus.load_config(DISK, path, {})),
    ("its choice", "config.path", lambda layout, path: nexus.choose_config(DISK, layout)),
    ("llm_config", "llm.json", lambda layout, path: nexus.find_llm_share(DISK, path, "qwen")),
    ("a certificate", "cert.pem", lambda layout, path: nexus.load_tls(DISK, nexus.ServiceConfig(tls_cert=path, tls_key=path))),
    ("the token", "token", lambda layout, path: nexus.read_token(DISK, layout)),
    ("users' tokens", "tokens.json", lambda layout, path: nexus.read_tokens(DISK, path)),
    ("the port", "port", lambda layout, path: nexus.find_port(DISK, layout, nexus.ServiceConfig())),
    ("where programs are", "programs.json", lambda layout, path: nexus.complete_path(DISK, layout, "/bin")),
    ("the service", "service.json", lambda layout, path: nexus.read_json(DISK, path)),
    ("submitted code", "code.py", lambda layout, path: nexus.read_bytes(DISK, path)),
    ("the state", "state.json", lambda layout, path: nexus.find_recovery(DISK, layout)),
    ("the journal", "journal.jsonl", lambda layout, path: nexus.find_recovery(DISK, layout)),
    ("the former journal", "journal.jsonl.prev", lambda layout, path: nexus.find_recovery(DISK, layout)),
    ("what ran on GPUs", "history/runs.jsonl", lambda layout, path: nexus.read_runs(DISK, path)),
    ("a list of commands", "commands.txt", lambda layout, path: nexus.read_sweep(f"a=@{path}")),
]


@pytest.mark.parametrize("what, name, read", READERS, ids=[case[0] for case in READERS])
@pytest.mark.parametrize("reason, make", ODD_FILES, ids=[case[0] for case in ODD_FILES])
def test_a_file_is_regular_and_has_a_limit(tmp_path, what, name, read, reason, make):
    """What is read is named, and so is what is wrong with it; nothing is waited for, or read without end."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if what == "a list of commands" and reason in ("a FIFO", "a terminal"):
        return                              # a person may name one; see below
    make(path)
    with pytest.raises((nexus.NexusError, OSError)) as raised:
        read(nexus.make_layout(str(tmp_path), nexus.Config()), str(path))
    words = str(raised.value)
    assert any(each in words for each in ("no regular file", "is longer than", "is no file", "there is no file", "No such device",
                                          "Is a directory")), words


def test_a_pipe_that_a_person_names_is_read_to_its_end():
    source, target = os.pipe()
    os.write(target, b"1\n2\n")
    os.close(target)
    try:
        assert nexus.read_sweep(f"a=@/dev/fd/{source}") == ("a", ("1", "2"))
    finally:
        os.close(source)

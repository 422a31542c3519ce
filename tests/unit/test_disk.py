"""Section 9: writing that survives a crash, reading what may be torn.  On a real folder."""

import contextlib
import errno
import functools
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import nexus

TOP = os.path.dirname(os.path.abspath(nexus.__file__))
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
    assert nexus.take_claim(disk, folder, 1) == nexus.read_claim(disk, folder, 1) == nexus.OUR_CLAIM
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


# The end of a log


def last_lines(content, count):
    """The model: lines as they stand between newlines."""
    lines = content.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    return b"".join(lines[-count:]) if count > 0 else b""


@given(st.lists(st.sampled_from([b"", b"a", b"a longer line", b"\r", b"\x0b", b"\xff"]), max_size=30), st.booleans(), st.integers(-1, 35))
@example([], False, 1)
@example([b""], True, 1)
@example([b"", b""], True, 1)
def test_find_tail_is_where_the_last_lines_begin(tmp_path_factory, lines, ends_with_newline, count):
    content = b"\n".join(lines) + (b"\n" if ends_with_newline else b"")
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(content)
    assert content[nexus.find_tail(DISK, str(path), count):] == last_lines(content, count)


BLOCK = 65536
TAILS = [  # reason, content, lines wanted
    ("a line longer than a block", b"first\n" + b"x" * (BLOCK + 10) + b"\n", 1),
    ("a newline that ends a block", b"a\n" + b"x" * (BLOCK - 1) + b"\n", 1),
    ("many lines over many blocks", b"0123456\n" * 40000, 30000), ("more lines wanted than there are", b"0123456\n" * 40000, 90000),
]


@pytest.mark.parametrize("reason, content, count", TAILS, ids=[case[0] for case in TAILS])
def test_find_tail_over_blocks(tmp_path, reason, content, count):
    (tmp_path / "log").write_bytes(content)
    assert content[nexus.find_tail(DISK, str(tmp_path / "log"), count):] == last_lines(content, count)


def test_find_tail_reads_only_the_end(tmp_path):
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.truncate(2**36)                    # 64 GiB of nothing, which take no room
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    assert nexus.find_tail(DISK, str(path), 1) == 2**36 + 1
    assert nexus.find_tail(DISK, str(path), 9, 2**36 - 100000) == 2**36 - 100000


def bar(count):
    return b"".join(b"\r%6d%%|%s" % (number, b"#" * 91) for number in range(count))        # 100 bytes each


BARS = [  # reason, a log, what is shown of it, with lines of more than 50 bytes as they were last
    ("a short line", b"a\rb\n", b"a\rb\n"), ("a long one", bar(3) + b"\nend\n", bar(3)[201:] + b"\nend\n"),
    ("longer than a block", b"a\n" + bar(2000), b"a\n" + bar(2000)[-99:]),
    ("it ends with its return", bar(9)[1:] + b"\r", bar(9)[-99:] + b"\r"),
    ("Windows", b"x" * 99 + b"\r\n", b"x" * 99 + b"\r\n"), ("no bar", b"x" * 200000 + b"\ny", b"x" * 200000 + b"\ny"),
    ("a short one behind a block", b"x" * 65533 + b"\na\rb\n", b"x" * 65533 + b"\na\rb\n"),
    ("two", bar(1500) + b"\n" + bar(1500), bar(1500)[-99:] + b"\n" + bar(1500)[-99:]),
]


@pytest.mark.parametrize("reason, log, shown", BARS, ids=[case[0] for case in BARS])
def test_a_progress_bar_is_shown_as_it_was_last(tmp_path, reason, log, shown):
    (tmp_path / "stdout.log").write_bytes(log)
    reader = nexus.LogReader(DISK, str(tmp_path), (0,))
    first = list(reader.read((), 50))
    entries = first + list(reader.flush())
    assert b"".join(entry.content for entry in entries) == shown
    assert [entry.end for entry in first] == sorted(entry.end for entry in first) and entries[-1].end == len(log)
    with open(tmp_path / "stdout.log", "ab") as file:
        file.write(bar(5))
    assert b"".join(entry.content for entry in [*reader.read(), *reader.flush()]) == bar(5), "all that comes then"
    for offset in {entry.end for entry in first}:
        resumed = nexus.LogReader(DISK, str(tmp_path), (0,))
        resumed.begin((), (offset, 0), None)
        assert b"".join(entry.content for entry in [*resumed.read(), *resumed.flush()]) == (log + bar(5))[offset:]


# Both logs of a job, in the order in which they grew

STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([b"a\n", b"bc", b"\n", b"\rd", b"e\nf\n", b"\xff"])), max_size=30)


def grow(folder, steps, noted=lambda number: True):
    """Write as a job would, and note sizes after some of the steps."""
    sizes = [0, 0]
    for number, (stream, piece) in enumerate(steps):
        with open(folder / ("stdout.log", "stderr.log")[stream], "ab") as file:
            sizes[stream] = file.write(piece) + sizes[stream]
        if noted(number):
            with open(folder / nexus.LOG_TIMES, "a", encoding="utf-8") as file:
                file.write(f"{number * 10} {sizes[0]} {sizes[1]}\n")
    return sizes


@given(STEPS, st.sets(st.integers(0, 30)), st.binary(max_size=9), st.lists(st.integers(0, 40), min_size=2, max_size=2),
       st.none() | st.integers(0, 9), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=3))
def test_a_reader_of_logs_loses_and_repeats_nothing(tmp_path_factory, steps, noted, torn, offsets, tail, starts):
    """Whatever of the sizes is noted, whatever is torn, wherever attempts begin, wherever it begins, it sees each byte once."""
    folder = tmp_path_factory.mktemp("logs")
    sizes = grow(folder, steps, noted.__contains__)
    with open(folder / nexus.LOG_TIMES, "ab") as file:
        file.write(torn)
    attempts = [nexus.Attempt(number=1 + number, log_start=start) for number, start in enumerate([(0, 0), *sorted(starts)])]
    reader = nexus.LogReader(DISK, str(folder))
    reader.begin(attempts, offsets, tail)
    begun = list(reader.offsets)
    assert all(place in (0, offset) or tail is not None for place, offset in zip(begun, offsets))
    ends, seen = list(begun), [b"", b""]
    for entry in [*reader.read(attempts), *reader.flush()]:
        seen[entry.stream] += entry.content
        ends[entry.stream] += len(entry.content)
        assert entry.end <= ends[entry.stream] + len(b"".join(reader.partial)) and entry.content
    for stream, name in enumerate(("stdout.log", "stderr.log")):
        content = (folder / name).read_bytes() if sizes[stream] else b""
        assert seen[stream] == content[begun[stream]:], (name, begun)
    assert ends == reader.offsets == sizes
    if tail is not None:
        assert sum(piece.count(b"\n") for piece in seen) <= tail
    again = nexus.LogReader(DISK, str(folder))
    again.begin(attempts, (0, 0), None)
    entries = [*again.read(attempts), *again.flush()]
    for place in range(len(entries)):               # and so does who goes on after any of them
        resumed = nexus.LogReader(DISK, str(folder))
        known = [0, 0]
        for entry in entries[:place]:
            known[entry.stream] = entry.end
        resumed.begin(attempts, known, None)
        rest = b"".join(entry.content for entry in [*resumed.read(attempts), *resumed.flush()])
        assert len(rest) == sum(len(entry.content) for entry in entries[place:])


@given(STEPS, st.sets(st.integers(0, 30)), st.integers(1, 20))
def test_logs_can_be_read_in_parts_of_whole_lines(tmp_path_factory, steps, noted, most):
    folder = tmp_path_factory.mktemp("logs")
    sizes = grow(folder, steps, noted.__contains__)
    offsets, seen, has_more = [0, 0], [b"", b""], True
    while has_more:
        reader = nexus.LogReader(DISK, str(folder))
        reader.begin((), offsets, None)
        has_more = reader.limit((), most)
        entries = [*reader.read(), *reader.flush()]
        assert 0 < sum(len(entry.content) for entry in entries) <= most or not sum(sizes)
        for entry in entries:
            seen[entry.stream] += entry.content
        for stream, begin, end in zip((0, 1), offsets, reader.offsets):
            content = (folder / nexus.STREAM_FILES[stream]).read_bytes() if sizes[stream] else b""
            is_cut = end not in (begin, sizes[stream]) and content[end - 1:end] != b"\n"
            assert not (is_cut and b"\n" in content[begin:end]), "only a line that is longer than a part is cut"
        offsets = list(reader.offsets)
        assert not has_more or offsets == reader.limits
    assert [len(content) for content in seen] == sizes == offsets


LONG_BARS = [  # reason, log, bytes of a part, what is shown of each part
    ("the state at the end of a part is not the last one", b"1%\r2%\r3%\r4%\n", 7, [b"", b"4%\n"]),
    ("it goes on in lines", b"1%\r2%\r3%\nend\n", 7, [b"", b"3%\nend\n"]),
    ("a long line is no bar", b"a" * 12, 8, [b"a" * 8, b"a" * 4]),
    ("it is all in the first part", b"1%\r2%", 7, [b"2%"]),
]


@pytest.mark.parametrize("reason, log, most, shown", LONG_BARS, ids=[case[0] for case in LONG_BARS])
def test_a_progress_bar_that_is_longer_than_a_part_has_one_last_state(tmp_path, reason, log, most, shown):
    (tmp_path / "stdout.log").write_bytes(log)
    offset, has_more = 0, True
    for expected in shown:
        assert has_more
        reader = nexus.LogReader(DISK, str(tmp_path), (0,))
        reader.begin((), (offset, 0), None)
        has_more = reader.limit((), most)
        assert b"".join(entry.content for entry in [*reader.read((), 0), *reader.flush()]) == expected
        offset = reader.offsets[0]
    assert not has_more


@given(st.lists(st.sampled_from([0, 1]), max_size=30))
def test_whole_lines_that_are_all_noted_come_in_their_order(tmp_path_factory, streams):
    folder = tmp_path_factory.mktemp("logs")
    steps = [(stream, b"%d\n" % number) for number, stream in enumerate(streams)]
    grow(folder, steps)
    reader = nexus.LogReader(DISK, str(folder))
    assert b"".join(entry.content for entry in reader.read()) == b"".join(piece for _, piece in steps)
    for tail in range(len(steps) + 1):
        reader = nexus.LogReader(DISK, str(folder))
        reader.begin((), (0, 0), tail)
        assert b"".join(entry.content for entry in reader.read()) == b"".join(piece for _, piece in steps[len(steps) - tail:])


def list_lines(entries):
    """[(number, stream, line)] in the order in which lines ended, then those that have not; each entry must say its first number."""
    lines, rests, number = [], [b"", b""], None
    for entry in entries:
        number = entry.line if number is None else number
        assert entry.line == number
        *whole, rests[entry.stream] = (rests[entry.stream] + entry.content).split(b"\n")
        lines += [(number + place, entry.stream, line + b"\n") for place, line in enumerate(whole)]
        number += len(whole)
    return lines, rests


@given(STEPS, st.sets(st.integers(0, 30)), st.integers(1, 40), st.none() | st.integers(1, 9))
def test_lines_have_numbers_and_are_found_by_them(tmp_path_factory, steps, noted, number, count):
    folder = tmp_path_factory.mktemp("logs")
    grow(folder, steps, noted.__contains__)
    reader = nexus.LogReader(DISK, str(folder))
    lines, _ = list_lines([*reader.read(), *reader.flush()])
    assert [place for place, *_ in lines] == list(range(1, len(lines) + 1))
    reader = nexus.LogReader(DISK, str(folder))
    reader.begin_at_line((), number)
    assert reader.number == min(number, len(lines) + 1)
    other = nexus.LogReader(DISK, str(folder))
    other.begin((), reader.offsets, None)
    counts = nexus.LineCounts(DISK)
    for _ in range(2):                              # the second time it is remembered
        other.count_lines(counts)
        assert other.number == reader.number
    reader.lines_left = count
    found, _ = list_lines([*reader.read_some(), *reader.flush()])
    assert found == lines[number - 1:][:count]


def test_lines_of_a_log_that_is_replaced_are_counted_anew(tmp_path):
    path, counts = tmp_path / "log", nexus.LineCounts(DISK)
    path.write_bytes(b"a\n" * 10)
    assert [counts.count(str(path), end) for end in (20, 6, 7, 99)] == [10, 3, 3, 10]
    (tmp_path / "new").write_bytes(b"longer\n" * 10)
    (tmp_path / "new").rename(path)
    assert counts.count(str(path), 70) == 10
    assert counts.count(str(tmp_path / "none"), 70) == 0


# Log folders


OWN = ("stdout.log", "stderr.log", "job.sh", "job.sh.77.tmp", "attempt-1", "attempt-12", "claim-77", "result-1.json",
       "fault-1", "slurm-1.log")
MADE = ("work/model.pt", "files/out/loss.txt", "core.77", "stdout.log.bak", "my job.sh")


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def test_of_a_job_all_that_is_nexus_own_is_removed(tmp_path):
    fill(tmp_path, *(f"job_abc/{name}" for name in OWN), "job_abcd/stdout.log")
    for _ in range(2):                          # the second time nothing is there
        nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
        assert os.listdir(tmp_path) == ["job_abcd"]


def test_what_a_job_made_is_never_removed(tmp_path):
    fill(tmp_path / "job_abc", *OWN, *MADE)
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "job_abc") == sorted(MADE)


@pytest.mark.parametrize("made", [(), ("work/a",)])
def test_a_script_that_came_with_a_job_is_nexus_own(tmp_path, made):
    fill(tmp_path / "job_abc", "stdout.log", "work/main.py", *made)
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "job_abc") == list(made) and (tmp_path / "job_abc").exists() == bool(made)


def test_a_link_in_place_of_the_script_s_folder(tmp_path):
    fill(tmp_path / "project", "main.py")
    fill(tmp_path / "job_abc", "stdout.log")
    (tmp_path / "job_abc/work").symlink_to(tmp_path / "project")
    nexus.remove_job_files(DISK, str(tmp_path), str(tmp_path / "job_abc"))
    assert files_of(tmp_path / "project") == ["main.py"]


def test_what_links_point_to_stays(tmp_path):
    outside = tmp_path / "data"
    fill(outside, "weights.pt")
    fill(tmp_path / "logs/job_abc", "stdout.log")
    os.symlink(outside, tmp_path / "logs/job_abc/stderr.log")
    os.symlink(outside / "weights.pt", tmp_path / "logs/job_abc/attempt-1")
    os.symlink("/nowhere", tmp_path / "logs/job_abc/job.sh")
    nexus.remove_job_files(DISK, str(tmp_path / "logs"), str(tmp_path / "logs/job_abc"))
    assert not (tmp_path / "logs/job_abc").exists() and files_of(outside) == ["weights.pt"]


NOT_REMOVED = [  # reason, log_dir, folder, below a root that holds logs/job_abc, data/, link -> logs/job_abc, job_lnk -> data
    ("not below log_dir", "logs", "data"), ("deeper than log_dir", ".", "logs/job_abc"), ("another name", "logs", "logs/abc"),
    ("by a way round", "logs", "logs/../logs/job_abc"), ("a link", "logs", "logs/job_lnk"), ("a file", "logs", "logs/job_file"),
    ("nothing", "logs", "logs/job_none"), ("no name", "logs", ""),
]


@pytest.mark.parametrize("reason, log_dir, folder", NOT_REMOVED, ids=[case[0] for case in NOT_REMOVED])
def test_no_other_folder_is_touched(tmp_path, reason, log_dir, folder):
    for name in ("logs/job_abc", "logs/abc", "data"):
        fill(tmp_path / name, "stdout.log")
    os.symlink(tmp_path / "data", tmp_path / "logs" / "job_lnk")
    (tmp_path / "logs" / "job_file").write_text("a file")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(nexus.NexusError) if reason != "nothing" else contextlib.nullcontext():
        nexus.remove_job_files(DISK, os.path.normpath(tmp_path / log_dir), f"{tmp_path}/{folder}" if folder else "")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


# The configuration


def test_config_file_is_read(tmp_path):
    path = tmp_path / "config.toml"
    assert nexus.load_config(DISK, str(path), {}) == nexus.parse_config({}, "config.toml"), "no file: the defaults"
    path.write_text('[service]\nport = 7000\n[gpu]\nids = [0, 2]\n')
    for environ, mock in (({}, None), ({"NEXUS_MOCK_GPUS": "3"}, 3)):
        made = nexus.load_config(DISK, str(path), environ)
        assert (made.service.port, list(made.gpu.ids), made.mock_gpus) == (7000, [0, 2], mock)


CONFIG_FAULTS = [  # reason, content, environment, words of the message
    ("a mock that is no number", b"", {"NEXUS_MOCK_GPUS": "two"}, ["NEXUS_MOCK_GPUS must be a whole number from 0 to 1024"]),
    ("a mock that is too many", b"", {"NEXUS_MOCK_GPUS": "1025"}, ["1024"]),
    ("a mock does not hide a wrong section", b"gpu = 5\n[service]\nprot = 1\n", {"NEXUS_MOCK_GPUS": "2"}, ["prot"]),
    ("bytes that are no text", b"[service]\nhost = '\xff'\nport = 'x'\n", {}, ["port"]),
]


@pytest.mark.parametrize("reason, content, environ, words", CONFIG_FAULTS, ids=[case[0] for case in CONFIG_FAULTS])
def test_a_bad_config_is_refused_with_where_and_why(tmp_path, reason, content, environ, words):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.load_config(DISK, str(path), environ)
    assert caught.value.kind == "usage"
    assert all(word in caught.value.message for word in words), caught.value.message


NO_FILES = [  # reason, how it is made
    ("a link that leads nowhere", lambda path: path.symlink_to("gone.toml")), ("a FIFO", lambda path: os.mkfifo(path)),
    ("a folder", lambda path: path.mkdir()), ("text that is nested too deeply", lambda path: path.write_text("a = " + "[" * 5000)),
]


@pytest.mark.parametrize("reason, make", NO_FILES, ids=[case[0] for case in NO_FILES])
def test_what_stands_in_the_place_of_the_file_is_not_taken_for_none(tmp_path, reason, make):
    make(tmp_path / "config.toml")
    with pytest.raises(nexus.NexusError, match=r"config\.toml is no") as caught:
        nexus.load_config(DISK, str(tmp_path / "config.toml"), {})
    assert caught.value.kind == "usage" and caught.value.hint



# tokens.json


def test_tokens_made_at_once_are_all_kept(tmp_path):
    code = """
        for number in range(10):
            nexus.change_tokens(nexus.DISK, sys.argv[1], lambda tokens: nexus.add_token(
                tokens, f"user{sys.argv[2]}", f"token-{sys.argv[2]}-{number:06}", None, 1000.0))
    """
    code, path = "import sys\nimport nexus\n" + textwrap.dedent(code), str(tmp_path / "tokens.json")
    children = [subprocess.Popen([sys.executable, "-c", code, path, str(number)], cwd=TOP) for number in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert len(nexus.read_tokens(DISK, path)) == 40 and os.stat(path).st_mode & 0o777 == 0o600
    nexus.change_tokens(DISK, path, lambda tokens: nexus.revoke_tokens(tokens, "user1"))
    assert {token.user for token in nexus.read_tokens(DISK, path).values()} == {"user0", "user2", "user3"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tokens": [{"user": "bob"}]}', '{"tokens": 5}'])
def test_tokens_that_are_garbage_let_nobody_in(tmp_path, text):
    path = str(tmp_path / "tokens.json")
    (tmp_path / "tokens.json").write_text(text)
    for act in (lambda: nexus.read_tokens(DISK, path), lambda: nexus.change_tokens(DISK, path, lambda tokens: tokens)):
        with pytest.raises(nexus.NexusError, match="not as nexus writes it") as raised:
            act()
        assert raised.value.kind == "unavailable"
    assert (tmp_path / "tokens.json").read_text() == text


# Logs of jobs elsewhere


def test_nobody_waits_for_a_fifo_in_the_place_of_a_log(tmp_path):
    os.mkfifo(tmp_path / "stderr.log")
    assert nexus.read_part(DISK, str(tmp_path / "stderr.log"), 0, 9) == b"" and nexus.measure_logs(DISK, str(tmp_path)) == (0, 0)
    assert nexus.read_text(DISK, str(tmp_path / "stderr.log")) == ""


# What a job may have put into its own folder, where its job.sh, its agent and the service look

def make_fifo(path):
    os.mkfifo(path)


def write(content):
    return lambda path: path.write_bytes(content)


HOSTILE_FILES = [  # reason, what makes the file
    ("a FIFO", make_fifo), ("a folder", os.mkdir), ("endless", lambda path: path.symlink_to("/dev/zero")),
    ("a link to nothing", lambda path: path.symlink_to("gone")), ("a link to itself", lambda path: path.symlink_to(path)),
    ("huge", write(b" " * (nexus.JOB_FILE_BYTES + 1))), ("too deep", write(b"[" * 100000)), ("no text", write(b"\xff\xfe\x00")),
    ("a list", write(b"[]")), ("no number", write(b'{"exit_code": NaN, "runtime_seconds": 1}')), ("nothing", write(b"")),
    ("no exit code", write(b'{"exit_code": 18446744073709551615, "runtime_seconds": 1}')),
    ("a truth for an exit code", write(b'{"exit_code": true, "runtime_seconds": 1}')),
    ("it ran for ever", write(b'{"exit_code": 0, "runtime_seconds": 1e300}')),
    ("a cause of the head's", write(b'{"exit_code": 0, "runtime_seconds": 1, "cause": "killed"}')),
    ("a cause that is a list", write(b'{"exit_code": 0, "runtime_seconds": 1, "cause": ["launch"]}')),
    ("a pid of 19 digits", write(b"9999999999999999999 5\n5\n")), ("a pid that is none", write(b"0 5\n5\n")),
    ("ticks without end", write(b"5 9999999999999999999\n")),
]


@pytest.mark.parametrize("reason, make", HOSTILE_FILES, ids=[case[0] for case in HOSTILE_FILES])
def test_what_a_job_put_in_place_of_its_files_is_none_of_them(tmp_path, reason, make):
    for name in ("result-1.json", "attempt-1", "fault-2", "log.times"):
        make(tmp_path / name)
    assert nexus.read_result(DISK, str(tmp_path), 1) is None
    assert not nexus.read_claim(DISK, str(tmp_path), 1).pid, "nobody's whom we could end"
    (tmp_path / "result-2.json").write_text('{"exit_code": null, "runtime_seconds": 0.0, "cause": "launch"}')
    line = nexus.read_result(DISK, str(tmp_path), 2).cause_line
    assert line is None or (len(line) <= nexus.MAX_WORDS and line.isprintable())
    assert nexus.read_log_times(DISK, str(tmp_path), (0, 0)) == []


def test_an_end_in_no_year_is_none(tmp_path):
    (tmp_path / "result-1.json").write_text('{"exit_code": 0, "runtime_seconds": 1.0}')
    os.utime(tmp_path / "result-1.json", (0, 300000000000))
    found = nexus.read_result(DISK, str(tmp_path), 1)
    assert found is None or found.finished_at <= nexus.MAX_TIME, "a file system may take no such time"

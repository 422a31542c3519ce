"""The end of a log, both logs of a job in their order, and their lines."""

import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import nexus

DISK = nexus.Disk()


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


# Logs of jobs elsewhere


def test_nobody_waits_for_a_fifo_in_the_place_of_a_log(tmp_path):
    os.mkfifo(tmp_path / "stderr.log")
    assert nexus.read_part(DISK, str(tmp_path / "stderr.log"), 0, 9) == b"" and nexus.measure_logs(DISK, str(tmp_path)) == (0, 0)

"""What is looked for in logs: only complete lines are given to a search."""

import pytest

import nexus

TEN = b"".join(b"%d\n" % number for number in range(10))
SEARCHES = [  # reason, text, context, pieces as (stream, content), what is shown
    ("a line", "b", 0, [(0, b"abc\nd\n")], "abc\n"),
    ("no line", "e", 0, [(0, b"abc\nd\n")], ""),
    ("any case", "nan", 0, [(0, b"Loss NaN\nnan\n")], "Loss NaN\nnan\n"),
    ("this case, as there is a capital", "NaN", 0, [(0, b"Loss NaN\nnan\n")], "Loss NaN\n"),
    ("any case of other letters", "\u00fcber", 0, ((0, text.encode()) for text in ["\u00dcBER\n", "\u00fcber\n", "uber\n"]),
     "\u00dcBER\n\u00fcber\n"),
    ("as it stands", "a.c(", 0, [(0, b"abc(\na.c(\n")], "a.c(\n"),
    ("bytes that are no text", "x", 0, [(0, b"\xff x\n\xff\n")], "\udcff x\n"),
    ("both streams", "x", 0, [(0, b"x 1\n"), (1, b"x 2\n")], "x 1\nx 2\n"),
    ("a last line without an end", "x", 0, [(0, b"a\nx\r")], "x\n"),
    ("lines around it", "5", 1, [(0, TEN)], "4\n5\n6\n"),
    ("more than there are", "5", 99, [(0, TEN)], TEN.decode()),
    ("lines around two, which meet", "5", 1, [(0, TEN + TEN[8:])], "4\n5\n6\n--\n4\n5\n6\n"),
    ("which touch", "5", 2, [(0, b"5\n1\n2\n3\n4\n5\n")], "5\n1\n2\n3\n4\n5\n"),
    ("which do not", "5", 1, [(0, b"5\n1\n2\n3\n4\n5\n")], "5\n1\n--\n4\n5\n"),
    ("lines around it in other pieces", "5", 3, [(0, b"%d\n" % number) for number in range(10)], "2\n3\n4\n5\n6\n7\n8\n"),
    ("and on the other stream", "5", 1, [(number % 2, b"%d\n" % number) for number in range(10)], "4\n5\n6\n"),
    ("what follows ends in the next piece but one", "a", 2, [(0, b"a\n"), (0, b"1\n"), (0, b"2\n9\n3\n4\n"), (0, b"a\n")],
     "a\n1\n2\n--\n3\n4\na\n"),
    ("nothing is left out between pieces", "a", 1, [(0, b"a\n1\n"), (0, b"2\na\n")], "a\n1\n2\na\n"),
    ("what was left out lies in a piece without any", "a", 1, [(0, b"a\n1\n"), (0, b"2\n3\n"), (0, b"4\na\n")], "a\n1\n--\n4\na\n"),
    ("a line in two pieces", "needle", 0, [(0, b"x" * 70000 + b"nee"), (0, b"dle\nneedl\n")], "dle\n"),
    ("the next attempt begins no line of the last", "needle", 0, [(0, b"nee"), (2, b"dle\n")], ""),
    ("a letter is never in two pieces", "n", 0, [(0, b"n"), (0, b"a\n")], "n\n"),
]


@pytest.mark.parametrize("reason, text, context, pieces, shown", SEARCHES, ids=[row[0] for row in SEARCHES])
def test_a_search_in_logs(reason, text, context, pieces, shown):
    def make_text(entry, attempts):
        assert entry.content.endswith(b"\n") and attempts == ()
        ends.append(entry)
        return b"--\n" * entry.is_after_gap + entry.content

    search, at, ends, found = nexus.LogSearch(text, context, make_text), [0, 0], [], b""
    lines = b""
    for number, content in pieces:
        stream = number % 2
        entry = nexus.LogEntry(1 + number // 2, stream, at[stream], at[stream] + len(content), None, content, line=1 + lines.count(b"\n"))
        found += search(entry, ())
        at[stream] += len(content)
        lines += content
    for entry in ends:
        assert entry.content.split(b"\n")[0] in lines.split(b"\n")[entry.line - 1], "its number is right"
    assert found.decode("utf-8", "surrogateescape") == shown
    for stream in (0, 1):
        own = [entry.end for entry in ends if entry.stream == stream]
        assert own == sorted(own) and all(end <= at[stream] for end in own), "from there on nothing is lost or repeated"


GROWTHS = [  # reason, sizes before and after, when each log was last written to, what the last one got; the sizes between
    ("stdout was written last", (0, 0), (5, 9), (20, 10), b"x\n", [(0, 9)]), ("stderr was", (0, 0), (5, 9), (10, 20), b"x\n", [(5, 0)]),
    ("at the same time", (0, 0), (5, 9), (10, 10), b"x\n", [(5, 0)]), ("what was there stays", (3, 4), (5, 9), (20, 10), b"x\n", [(3, 9)]),
    ("a bar ended, a line came, a bar began", (0, 0), (5, 9), (10, 20), b"\r99%\n\r1%", [(0, 6), (5, 6)]),
    ("a bar was drawn before, and ended now", (0, 5), (5, 9), (10, 20), b"\r99%\n\r1%", [(0, 6), (5, 6)]),
    ("it ended before", (0, 6), (5, 9), (10, 20), b"\r99%\n\r1%", [(5, 6)]),
    ("a bar on stdout", (0, 2), (9, 5), (20, 10), b"\r99%\n\r1%", [(6, 2), (6, 5)]),
    ("a line of words before a bar", (0, 0), (5, 9), (10, 20), b"hello\n\r1%", [(5, 0)]),
    ("a bar ended at the same time", (0, 0), (5, 9), (10, 10), b"\r1%\r99%\n", [(0, 9)]),
    ("a bar that has ended", (0, 0), (5, 9), (10, 20), b"\r1%\r99%\n", [(5, 0)])]


@pytest.mark.parametrize("reason, former, sizes, changed_at, content, steps", GROWTHS, ids=[row[0] for row in GROWTHS])
def test_what_was_written_last_comes_last(reason, former, sizes, changed_at, content, steps):
    assert nexus.order_growth(former, sizes, changed_at, content) == steps

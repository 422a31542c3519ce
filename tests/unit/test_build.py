"""build.py: what it joins, what it refuses, and where a line of nexus.py comes from."""


import pytest

import build
import nexus

OPENING = '''#!/usr/bin/env python3
"""What it is."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
    Json = Any
'''
TEXT = '''"""Texts.

They are short.
"""

from __future__ import annotations

import os
from shlex import quote

from ..opening import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import IO


def format_time(now: IO[str]) -> str:
    import json
    return quote(json.dumps(os.environ))
'''
PAGE = '''"""The page."""

from .. import text_of
from ..values.text import format_time

PAGE = text_of("page.html")
SCRIPT = text_of("job.sh")
print(format_time)
'''
FILES = {
    "opening.py": OPENING, "values/text.py": TEXT, "page/page.py": PAGE,
    "page/page.html": '<html>\n<link rel="stylesheet" href="page.css">\n<script src="a.js"></script>\n'
                      '<script src="b.js"></script>\n</html>\n',
    "page/page.css": "a { color: red; }\n", "page/a.js": "let a = 1;\n", "page/b.js": "a = 2;\n",
    "page/job.sh": "# shellcheck shell=sh\necho \\n\n"}
JOINED = '''#!/usr/bin/env python3
"""What it is."""

from __future__ import annotations

import os
from shlex import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, IO
    Json = Any


# ==== src/values/text.py ====
# Texts.
# They are short.

def format_time(now: IO[str]) -> str:
    import json
    return quote(json.dumps(os.environ))


# ==== src/page/page.py ====
# The page.

PAGE = r\'\'\'<html>
<style>
a { color: red; }
</style>
<script>
let a = 1;

a = 2;
</script>
</html>
\'\'\'
SCRIPT = r\'\'\'
echo \\n
\'\'\'
print(format_time)
'''


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """Writes files of a src/, given as {path: text}, beside those above."""
    monkeypatch.setattr(build, "TOP", tmp_path)
    monkeypatch.setattr(build, "ROOMS", ["opening", "values/text", "page/page"])

    def write(**changed):
        for path, text in {**FILES, **changed}.items():
            (tmp_path / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "src" / path).write_text(text)

    return write


def test_the_rooms_become_one_module(rooms):
    rooms()
    joined = build.join()
    assert "\n".join(line for line, _, _ in joined) == JOINED
    places = {line: f"{path}:{number}" for line, path, number in joined}
    assert places["    import json"] == "src/values/text.py:18" and places["a = 2;"] == "src/page/b.js:1"
    assert places["# Texts."] == "src/values/text.py:1" and places["echo \\n"] == "src/page/job.sh:2"


REFUSED = [  # reason, {file: text}, what is said
    ("two define a name", {"page/page.py": '"""x"""\ndef format_time(): pass\n'},
     "src/page/page.py:2: format_time is defined in src/values/text.py:17, too"),
    ("a name is imported in one and defined in another", {"page/page.py": '"""x"""\nquote = 1\n'},
     "src/page/page.py:2: quote is defined in src/values/text.py:9, too"),
    ("as", {"page/page.py": '"""x"""\nfrom ..values.text import format_time as f\n'},
     "src/page/page.py:2: a name of another room is imported as it is, without `as` and `*`"),
    ("*", {"page/page.py": '"""x"""\nfrom ..values.text import *\n'},
     "src/page/page.py:2: a name of another room is imported as it is, without `as` and `*`"),
    ("from below", {"values/text.py": '"""x"""\nfrom ..page.page import PAGE\n'},
     "src/values/text.py:2: page/page.py stands below: a room uses those above it, and others only under TYPE_CHECKING"),
    ("in a function", {"page/page.py": '"""x"""\ndef f():\n    from ..values.text import format_time\n'},
     "src/page/page.py:3: rooms are imported at the top of a room"),
    ("a room that is not there", {"page/page.py": '"""x"""\nfrom .other import f\n'},
     "src/page/page.py:2: there is no room page/other.py in the list of build.py"),
    ("a room that is not in the list", {"page/more.py": '"""x"""\n'}, "src/page/more.py:1: it is not in the list of build.py"),
    ("a text that ends its string", {"page/b.js": "'''\n"}, "src/page/b.js:1: three quotes would end the string in nexus.py")]


@pytest.mark.parametrize("reason, files, said", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_joined_is_refused(rooms, reason, files, said):
    rooms(**files)
    with pytest.raises(build.Fault) as raised:
        build.join()
    assert str(raised.value) == said


def test_what_is_only_for_types_may_come_from_below(rooms):
    rooms(**{"values/text.py": '"""x"""\nfrom ..opening import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..page.page import PAGE\nA = 1\n',
             "page/page.py": '"""x"""\nPAGE = 1\n', "page/page.html": ""})
    assert [line for line, _, _ in build.join()][-10:] == [
        "# ==== src/values/text.py ====", "# x", "", "A = 1", "", "", "# ==== src/page/page.py ====", "# x", "", "PAGE = 1", ""][1:]


def test_the_committed_file_is_what_the_rooms_make(monkeypatch, capsys):
    joined = build.join()
    monkeypatch.setattr(build, "join", lambda: joined)
    build.main(["--check"])
    build.main(["--where", str(nexus.Client.add.__code__.co_firstlineno)])
    path, _, line = capsys.readouterr().out.strip().partition(":")
    assert path == "src/cli/client.py" and "def add" in (build.TOP / path).read_text().splitlines()[int(line) - 1]
    with pytest.raises(SystemExit, match="--where LINE"):
        build.main(["--where", "0"])

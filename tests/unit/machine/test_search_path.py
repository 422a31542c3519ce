"""Programs on PATH."""

import errno
import os
import subprocess
from unittest import mock

import nexus


def test_a_program_is_found_where_no_process_can_be_started(tmp_path, monkeypatch):
    (tmp_path / "one").touch(0o755)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "no more")))
    assert nexus.find_program("one", f"/none:{tmp_path}") == str(tmp_path / "one") and nexus.find_program("two", str(tmp_path)) is None


def test_many_programs_are_found_by_one_search(tmp_path):
    """Each in the first folder that has it; what is a folder, or may not be run, is none."""
    for folder, name, mode in (("a", "one", 0o755), ("b:", "one", 0o755), ("b:", "t*o", 0o755), ("b:", "three", 0o644)):
        os.makedirs(tmp_path / folder, exist_ok=True)
        (tmp_path / folder / name).touch(mode)
    os.mkdir(tmp_path / "a" / "four")
    started, plain = [], subprocess.Popen
    names = ["one", "t*o", "three", "four", "five", ""]
    with mock.patch.object(subprocess, "Popen", lambda *words, **options: started.append(words) or plain(*words, **options)):
        found = nexus.look_in(names, ["/none", f"{tmp_path}/a", f"{tmp_path}/b:"], os.X_OK)
    assert found == {"one": f"{tmp_path}/a/one", "t*o": f"{tmp_path}/b:/t*o"} and len(started) == 1
    assert nexus.find_program(f"{tmp_path}/b:/t*o") == f"{tmp_path}/b:/t*o"


def test_runners_look_only_where_their_programs_are(tmp_path):
    os.mkdir(tmp_path / "other")
    assert nexus.keep_needed(f"{tmp_path}/other:/usr/bin:/none:/bin", ["sh", "sleep", "no-such-program"]) in ("/usr/bin", "/usr/bin:/bin")
    assert nexus.keep_needed(f"{tmp_path}/other", ["sh"]) == f"{tmp_path}/other", "where nothing is found, PATH stays"

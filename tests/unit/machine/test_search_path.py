"""Programs on PATH."""

import errno
import os
import subprocess

import nexus


def test_a_program_is_found_where_no_process_can_be_started(tmp_path, monkeypatch):
    (tmp_path / "one").touch(0o755)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "no more")))
    assert nexus.find_program("one", f"/none:{tmp_path}") == str(tmp_path / "one") and nexus.find_program("two", str(tmp_path)) is None


def test_runners_look_only_where_their_programs_are(tmp_path):
    os.mkdir(tmp_path / "other")
    assert nexus.keep_needed(f"{tmp_path}/other:/usr/bin:/none:/bin", ["sh", "sleep", "no-such-program"]) in ("/usr/bin", "/usr/bin:/bin")
    assert nexus.keep_needed(f"{tmp_path}/other", ["sh"]) == f"{tmp_path}/other", "where nothing is found, PATH stays"

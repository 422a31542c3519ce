"""Programs that go on by themselves."""

import os
import re
import signal

import pytest
from live import until

import nexus

# Programs that go on by themselves


@pytest.mark.parametrize("folder", ["/", "/tmp"], ids=["by posix_spawn", "by subprocess"])
def test_a_spawned_program_inherits_what_it_is_passed_and_nothing_else(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(folder)
    with open(tmp_path / "given", "w") as given, open(tmp_path / "passed", "w") as first, open(tmp_path / "passed", "w") as second:
        os.set_inheritable(given.fileno(), True)
        nexus.withhold_descriptors()
        (tmp_path / "look").write_text("#!/bin/sh\nexec > \"$1\"; ls -l /proc/self/fd; pwd; grep SigIgn /proc/self/status; "
                                       "ps -o sid= -p $$; echo $$; echo \"$TEXT\"\n")
        (tmp_path / "look").chmod(0o755)
        handles = [first.fileno(), second.fileno()]
        child = nexus.spawn(str(tmp_path / "look"), ["look", str(tmp_path / "said")], {"PATH": os.environ["PATH"], "TEXT": "a b"},
                            handles)
        until(lambda: child.poll() is not None)
        assert not any(os.get_inheritable(handle) for handle in handles)
    listing, _, rest = (tmp_path / "said").read_text().partition("\n/\n")
    assert rest, listing
    ignored, session, pid, text = rest.splitlines()
    assert session.strip() == pid == str(child.pid) and text == "a b"
    assert int(ignored.split()[1], 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0
    assert sorted(map(int, re.findall(r" (\d+) -> .*/passed", listing))) == sorted(handles)
    assert "/given" not in listing and re.search(r" 0 -> /dev/null\n", listing) and re.search(r" 2 -> /dev/null\n", listing)


@pytest.mark.parametrize("folder", ["/", "/tmp"], ids=["by posix_spawn", "by subprocess"])
def test_a_program_that_is_not_there_cannot_be_spawned(monkeypatch, folder):
    monkeypatch.chdir(folder)
    with pytest.raises(FileNotFoundError):
        nexus.spawn("no-such-program", ["no-such-program"], {"PATH": os.environ["PATH"]})

"""Which launcher has a session."""

import os
import shutil
import tempfile

import pytest
from makers import config, find_faults

import nexus

# Screen


@pytest.fixture
def short():
    """A folder with a short path: sockets must have one."""
    path = tempfile.mkdtemp(prefix="nx", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)

NO_LAUNCHER = [  # reason, its program (None: none), why
    ("not installed", None, "is not installed"),
    ("it cannot be run", "\0\0", "Exec format"),
    ("it fails as it likes", "#!/bin/sh\necho getpwuid can not identify your account >&2; exit 1\n", "getpwuid"),
]

WITH_SESSIONS = [name for name, kind in nexus.LAUNCHERS.items() if kind.session_prefix]


@pytest.mark.parametrize("launcher", WITH_SESSIONS)
@pytest.mark.parametrize("reason, program, words", NO_LAUNCHER, ids=[case[0] for case in NO_LAUNCHER])
def test_a_launcher_that_cannot_be_used(short, monkeypatch, launcher, reason, program, words):
    """Jobs run directly then."""
    name, layout = nexus.LAUNCHERS[launcher].program, nexus.make_layout(short, config())
    os.mkdir(f"{short}/bin")
    monkeypatch.setenv("PATH", f"{short}/bin")
    if program is not None:
        with open(f"{short}/bin/{name}", "w") as file:
            file.write(program)
        os.chmod(f"{short}/bin/{name}", 0o755)
    machine = nexus.Machine(config(launcher=launcher, mock_gpus=1), layout, nexus.DISK, "0-aaaaaaaa")
    error = machine.launcher_error
    assert type(machine.launcher) is nexus.Direct and machine.terminal_error == error.message
    assert error.message.startswith(name) and words in error.message and name in error.hint


# Launchers


def test_every_launcher_of_the_configuration_is_one_of_the_table():
    assert [*nexus.LAUNCHERS] == nexus.JobsConfig.FIELDS["launcher"].schema["enum"]


@pytest.mark.parametrize("name", [name for name in nexus.LAUNCHERS if name not in WITH_SESSIONS])
def test_a_launcher_without_sessions(short, name):
    machine = nexus.Machine(config(launcher=name, mock_gpus=1), nexus.make_layout(short, config()), nexus.DISK, "0-aaaaaaaa")
    assert (machine.terminal_error, machine.launcher_error) == (f'launcher is "{name}"', None)
    assert not machine.launcher.list_sessions() and not machine.launcher.login_variables()
    # Nothing of another launcher's is there.
    assert {*machine.launcher.environ()} <= {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "USER", "LOGNAME", "SHELL"}

SESSIONS = [  # session, its launcher
    *((f"12.{nexus.LAUNCHERS[name].session_prefix}abc", name) for name in WITH_SESSIONS),
    ("12.nexus_job_abc", "screen"), ("12.whatever", "screen"),
]


@pytest.mark.parametrize("session, launcher", SESSIONS)
def test_a_session_tells_its_launcher(session, launcher):
    """So a job is attached to by the one that started it, whatever the configuration says by then, here or on a node."""
    assert nexus.find_launcher(session) is nexus.LAUNCHERS[launcher]
    assert not find_faults(nexus.FACT_KINDS["Session"].schema, session)

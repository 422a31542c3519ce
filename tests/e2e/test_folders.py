"""Whose folders nexus works in: tried with another user who may write where the owner does not look."""

import contextlib
import json
import os
import subprocess
import types

import live
import pytest


@pytest.fixture(scope="module")
def users():
    """ann, whose nexus it is, and bob; `shared` is a folder like /tmp, `open` one where all may do all."""
    with contextlib.ExitStack() as stack:
        tools = live.Tools()
        stack.callback(tools.close)
        people = [live.User(tools) for _ in range(2)]
        for user in people:
            stack.callback(user.remove)
        yield types.SimpleNamespace(tools=tools, ann=people[0], bob=people[1], shared=tools.folder / "shared", open=tools.folder / "open")


@pytest.fixture
def box(users):
    with live.Box(gpus=1, user=users.ann, is_starting=False) as box:
        yield box


def make(path, owner, mode, content=None):
    """A folder, or a file with this content."""
    if content is None:
        path.mkdir(exist_ok=True)
    else:
        path.write_text(content)
    os.chown(path, owner.uid, 65534)
    path.chmod(mode)
    return path


def refused(box, *words, **environ):
    """What a start says that must come to nothing, and nothing must run."""
    done = box.nexus("start", environ=environ)
    assert done.returncode == 5 and "hint: " in done.stderr and "Traceback" not in done.stderr, done
    assert all(word in done.stderr for word in words), done.stderr
    assert not live.find_processes(f"NEXUS_HOME={environ.get('NEXUS_HOME', box.home)}")
    return done.stderr


def test_a_home_of_somebody_else(users, box):
    home = make(users.shared / "home-1", users.bob, 0o777)
    refused(box, f"{home} (NEXUS_HOME) belongs to {users.bob.name}", "could run commands as you", NEXUS_HOME=str(home))
    for command in (["add", "true"], ["status"], ["config"], ["token", "create", "x"], ["serve"], ["stop"]):
        done = box.nexus(*command, environ={"NEXUS_HOME": str(home)})
        assert done.returncode == 5 and users.bob.name in done.stderr, done
    assert not os.listdir(home)


def test_a_home_that_anybody_could_exchange(users, box):
    refused(box, f"other users could exchange {users.open}/home-2", f"chmod o-w {users.open}",
            NEXUS_HOME=str(make(users.open / "home-2", users.ann, 0o700)))
    refused(box, f"other users could exchange {users.open}", NEXUS_HOME=str(users.open / "none" / "home"))
    link = users.open / "link-2"                        # of one's own, and to one's own, but where all may write
    link.symlink_to(make(users.shared / "home-9", users.ann, 0o700))
    os.chown(link, users.ann.uid, 65534, follow_symlinks=False)
    refused(box, f"other users could exchange {link}", NEXUS_HOME=str(link))


def test_a_home_below_a_folder_that_somebody_made_before(users, box):
    """In a folder like /tmp."""
    above = make(users.shared / "for-ann", users.bob, 0o777)
    home = make(above / "home", users.ann, 0o700)
    above.chmod(0o755)
    refused(box, f"other users could exchange {above}", NEXUS_HOME=str(home))


def test_a_home_in_a_folder_like_tmp(users, box):
    """By way of a link of one's own, too."""
    make(users.shared / "home-3", users.ann, 0o755)
    link = users.shared / "link-3"
    link.symlink_to("home-3")
    os.chown(link, users.ann.uid, 65534, follow_symlinks=False)
    environ = {"NEXUS_HOME": str(link)}
    subprocess.run(["cp", "-p", box.home / "config.toml", users.shared / "home-3"], check=True)
    done = box.nexus("run", "--gpus", "0", "echo hello", environ=environ)
    try:
        assert done.stdout == "hello\n", done
        assert (users.shared / "home-3").stat().st_mode & 0o777 == 0o700
    finally:
        box.nexus("stop", environ=environ)


def test_a_log_folder_of_somebody_else(users, box):
    logs = make(users.shared / "logs-4", users.bob, 0o777)
    box.write_config(log_dir=str(logs))
    refused(box, f"{logs} ([state] log_dir) belongs to {users.bob.name}")
    box.write_config(log_dir=str(users.open / "logs-4"))
    refused(box, f"other users could exchange {users.open}")
    assert not os.listdir(logs)


def test_a_state_folder_that_others_may_write(users, box):
    box.write_config(state_file=str(users.shared / "state.json"))
    refused(box, f"{users.shared} (the folder of [state] state_file) belongs to root")
    folder = make(users.shared / "state-5", users.ann, 0o777)
    box.write_config(state_file=str(folder / "state.json"))
    refused(box, f"others may write into {folder}", f"chmod go-w {folder}")
    folder.chmod(0o755)
    assert box.nexus("start").returncode == 0 and (folder / "state.json").exists()


def test_a_home_or_log_folder_that_others_may_write(users, box):
    """Everybody, or a group."""
    for mode in (0o777, 0o775):
        logs = make(users.shared / "logs-6", users.ann, mode)
        box.write_config(log_dir=str(logs))
        refused(box, f"others may write into {logs} ([state] log_dir)", f"chmod go-w {logs}")
    logs.chmod(0o755)
    box.home.chmod(0o777)                               # its cache/ may hold anybody's compiled code
    refused(box, f"others may write into {box.home} (NEXUS_HOME)", f"chmod go-w {box.home}")
    box.home.chmod(0o755)
    box.start()
    assert box.home.stat().st_mode & 0o777 == 0o700


FORGED = [  # reason, mode of the home while another user writes there, and later; what a command says; has it a service.json
    ("all may write there", 0o777, 0o777, "others may write into {home} (NEXUS_HOME)", True),
    ("a group may", 0o777, 0o770, "others may write into {home} (NEXUS_HOME)", False),
    ("all could write there before", 0o777, 0o700, "{home}/api.sock belongs to a program of {user}: nothing was sent to it", True),
    ("all could, and it is there alone", 0o777, 0o700, "{home}/api.sock belongs to a program of {user}: nothing was sent to it", False),
]


def test_another_users_socket_in_the_home_gets_nothing(users, box):
    """Neither the environment nor anything else."""
    box.start()
    running = box.info()
    box.nexus("stop")
    box.folder.chmod(0o755)
    path, told = box.home / "api.sock", box.home / "service.json"
    for reason, before, after, words, has_file in FORGED:
        box.home.chmod(before)
        path.unlink(missing_ok=True)
        with live.listener(0, users.bob.uid, str(path)) as heard:
            assert heard() == "listens\n"
            own = live.until(users.bob.processes)[0]
            if has_file:
                make(told, users.bob, 0o644, json.dumps({**running, "pid": own, "started": int(live.stat(own)[19])}))
            box.home.chmod(after)
            for command in (["add", "true"], ["run", "true"], ["jobs"], ["start"], ["stop"], ["logs", "service"]):
                done = box.nexus(*command, environ={"SECRET": "hunter2"})
                assert done.returncode == 5 and words.format(home=box.home, user=users.bob.name) in done.stderr, (reason, command, done)
                assert "\nhint: " in done.stderr and "Traceback" not in done.stderr
            assert heard() == "listens\n", reason
        told.unlink(missing_ok=True)
    # What the messages say helps
    box.home.chmod(0o700)
    path.unlink()
    assert box.nexus("run", "--gpus", "0", "echo $SECRET", environ={"SECRET": "hunter2"}).stdout == "hunter2\n"


def test_service_json_leads_to_no_other_socket(users, box):
    """The socket of a home is in it."""
    box.start()
    with live.listener(0, users.bob.uid, str(users.open / "elsewhere.sock")) as heard:
        told = json.dumps({**box.info(), "socket": str(users.open / "elsewhere.sock")})
        make(box.home / "service.json", users.ann, 0o600, told)
        assert box.nexus("run", "--gpus", "0", "echo $SECRET", environ={"SECRET": "hunter2"}).stdout == "hunter2\n"
        assert heard() == "listens\n"


def test_a_home_with_a_long_path():
    """Its socket is found there all the same, also without service.json."""
    with live.Box(gpus=1, name="x" * 150) as box:
        assert box.nexus("run", "echo hello").stdout == "hello\n"
        (box.home / "service.json").unlink()
        assert box.nexus("run", "echo hello").stdout == "hello\n" and not (box.home / "service.json").exists()
        assert box.nexus("stop").returncode == 0 and not box.supervisors()


def test_all_that_nexus_makes_is_the_owners_alone():
    """Whatever the umask; jobs and hooks have the umask of whoever started the service."""
    with live.Box(gpus=1, is_starting=False) as box:
        box.write_config(on_finish=f"touch {box.path('hook')}", log_max_mb=0.1, log_backups=2)
        (box.home / "service.log").write_text("old\n" * 30000)
        done = subprocess.run(["sh", "-c", 'umask 026; exec "$@"', "-", *box.argv("start")], env=box.environ, cwd="/", capture_output=True)
        assert done.returncode == 0, done
        ids = [box.add(f"touch {box.path('job')}; umask; x={'x' * 400}", gpus=0) for _ in range(3)]
        assert {box.wait(job_id, "completed")["exit_code"] for job_id in ids} == {0}
        assert box.logs(ids[0]) == "0026\n"
        live.until(lambda: box.path("hook").exists())
        for name in ("job", "hook"):
            assert box.path(name).stat().st_mode & 0o777 == 0o640, name
        box.kill_service()
        box.await_service()
        live.until(lambda: (box.home / "service.log.1").exists())
        made = {str(path): oct(path.stat().st_mode) for path in (box.home, *box.home.rglob("*"))
                if path.stat().st_mode & 0o077 and not path.is_symlink() and path.name not in ("config.toml", "service.log.1")}
        assert not made

"""Scripts that users send."""

import errno
import os

import pytest
from stage import BEARER, FORM_TYPE, ME, MINE, OWNER, TOKEN, WRONG, Bench, is_error, make_form

import nexus


def add_tokens(bench):
    """myuser's, and two of hers that are over."""
    def change(tokens):
        tokens = nexus.add_token(tokens, "myuser", "my-secret-token", None, 1e9)
        tokens = nexus.add_token(tokens, "myuser", "my-expired-token", 1.1e9, 1e9)
        return nexus.revoke_tokens(nexus.add_token(tokens, "myuser", "my-revoked-token", None, 1e9), "my-revoked-token")
    nexus.change_tokens(nexus.DISK, bench.layout.tokens_file, change)


def submit(bench, config=MINE, code=b"print()\n", headers=None, uid=OWNER + 1, peer="127.0.0.1"):
    return bench.ask("POST", "/api/submit", make_form(config, code), {**FORM_TYPE, **(headers or {})}, uid=uid, peer=peer)


def kept_code(bench):
    folder = bench.layout.code_folder
    return sorted(os.listdir(folder)) if os.path.exists(folder) else []


@pytest.fixture
def lab():
    """A Bench that myuser has a token for."""
    with Bench(allowed_hosts=["gpu.example.org"], queue_limit=3) as made:
        add_tokens(made)
        yield made

MY_BEARER = {"authorization": "Bearer my-secret-token"}

FORWARDED = {"x-forwarded-for": "192.0.2.7"}

SUBMITTERS = [  # reason, config_file, headers, uid, status, whose job it is (or a word of the refusal)
    ("another user of the machine, by her token", MINE, {}, OWNER + 1, 200, "myuser"),
    ("she says who she is", MINE + "user_id: myuser", {}, OWNER + 1, 200, "myuser"),
    ("she says that she is another", MINE + "user_id: bob", {}, OWNER + 1, 403, "bob"),
    ("no token", "user_id: myuser", {}, OWNER + 1, 401, "this machine"),
    ("a wrong token", "token: my-secret-tokem", {}, OWNER + 1, 401, "not right"),
    ("a wrong token, though it is the owner", "token: my-secret-tokem", {}, OWNER, 401, "not right"),
    ("an expired token", "token: my-expired-token", {}, OWNER + 1, 401, "not right"),
    ("the owner", "name: x", {}, OWNER, 200, ME),
    ("the owner, for another", "user_id: bob", {}, OWNER, 200, "bob"),
    ("the owner's token", f"token: {TOKEN}\nuser_id: bob", {}, OWNER + 1, 200, "bob"),
    ("her token in the header", "name: x", MY_BEARER, OWNER + 1, 200, "myuser"),
    ("the owner's in the header, hers in the file", MINE, BEARER, OWNER + 1, 200, "myuser"),
    ("a wrong one in the header", MINE, WRONG, OWNER + 1, 200, "myuser"),
    ("through a proxy", MINE, FORWARDED, OWNER, 200, "myuser"),
    ("through a proxy, without a token", "name: x", FORWARDED, OWNER, 401, "forwarded"),
    ("through a tunnel", MINE, {"host": "gpu.example.org"}, None, 200, "myuser"),
    ("through another tunnel", MINE, {"host": "evil.example"}, OWNER, 403, "evil.example"),
    ("another site's page", MINE, {"origin": "http://evil.example"}, OWNER, 403, "Origin"),
]


@pytest.mark.parametrize("reason, config, headers, uid, status, word", SUBMITTERS, ids=[case[0] for case in SUBMITTERS])
def test_who_may_submit_a_script(lab, reason, config, headers, uid, status, word):
    given, answer = submit(lab, config, headers=headers, uid=uid)
    assert given == status, answer
    if status == 200:
        assert answer == {"job_id": answer["job_id"], "node_id": 0, "status": "pending", "queue_position": 0}
        assert lab.ask("GET", f"/jobs/{answer['job_id']}")[1]["user"] == word and len(kept_code(lab)) == 1
        assert f"added by {'myuser (token' if word == 'myuser' else ME}" in lab.lines[-1]
    else:
        assert is_error(answer) and word in answer["message"] and kept_code(lab) == [] and lab.commands == []
        named = "myuser (token, " if word == "bob" else ""
        assert f"Refused POST /api/submit from {named}" in lab.lines[-1] and "my-" not in lab.lines[-1] + answer["message"] + answer["hint"]

FORM_REFUSALS = [  # reason, body, headers, status, words
    ("JSON", b"{}", {"content-type": "application/json"}, 415, "multipart/form-data"),
    ("nothing", b"", {"content-type": None}, 415, "nothing"),
    ("no boundary", make_form(), {"content-type": "multipart/form-data"}, 400, "boundary"),
    ("no form", b"hello", {}, 400, "begin"),
    ("no code", make_form().replace(b'name="code"', b'name="name"'), {}, 400, "fields code and config_file"),
    ("empty code", make_form(code=b""), {}, 400, "code is empty"),
    ("too large a script", make_form(code=b"x" * (5 * 2**20 + 1)), {}, 413, "code"),
    ("too large a form", b"x" * (10 * 2**20 + 1), {}, 413, "10485760"),
    ("nested YAML", make_form(MINE + "gpus: [1]"), {}, 400, "config_file: gpus"),
    ("an unknown key", make_form(MINE + "expectedtime: 1"), {}, 400, "config_file: 'expectedtime'"),
    ("more GPUs than there are", make_form(MINE + "gpus: 3"), {}, 400, "3 GPUs"),
    ("a bad key", make_form(), {"idempotency-key": "x"}, 400, "Idempotency-Key"),
]


@pytest.mark.parametrize("reason, body, headers, status, words", FORM_REFUSALS, ids=[case[0] for case in FORM_REFUSALS])
def test_forms_are_refused(lab, reason, body, headers, status, words):
    given, answer = lab.ask("POST", "/api/submit", body, {**FORM_TYPE, **headers}, uid=OWNER + 1)
    assert given == status and is_error(answer) and words in answer["message"], answer
    assert kept_code(lab) == [] and lab.commands == []


def write_script(lab, job):
    lab.service.job_host.write_script(lab.service.starter.make_order(job, {}))


def test_a_submitted_script(lab):
    code = b"\xff\xfe\r\n\0\r--B\n"
    job_id = submit(lab, "gpus: 0.5\npriority: low\nname: x\n" + MINE, code)[1]["job_id"]
    job = lab.ask("GET", f"/jobs/{job_id}")[1]
    assert (job["user"], job["gpus"], job["priority"], job["name"]) == ("myuser", 0.5, 2, "x")
    with open(lab.layout.code_file(lab.store.state.jobs[job_id].code), "rb") as file:
        assert file.read() == code
    assert os.stat(file.name).st_mode & 0o777 == 0o600 and os.stat(lab.layout.code_folder).st_mode & 0o777 == 0o700
    lab.become(job_id, "running", log_dir=lab.layout.job_folder(job_id))
    write_script(lab, lab.store.state.jobs[job_id])
    main = os.path.join(job["cwd"], "main.py")
    for put in (lambda: os.symlink("/etc/passwd", main), lambda: os.makedirs(f"{main}/made")):      # what an attempt made of it
        os.unlink(main)
        put()
        write_script(lab, nexus.begin_attempt(lab.store.state.jobs[job_id]))
        with open(main, "rb") as file:
            assert file.read() == code and not os.path.islink(main)
    os.unlink(os.path.join(lab.layout.code_folder, kept_code(lab)[0]))
    with pytest.raises(nexus.NexusError):
        write_script(lab, lab.store.state.jobs[job_id])


def test_a_script_that_cannot_be_kept_is_no_job(lab, monkeypatch):
    def fail(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(lab.service.disk, "replace", fail)
        status, answer = submit(lab, "name: x", uid=OWNER)
    assert status == 503 and "No space" in answer["message"] and lab.commands == [] and kept_code(lab) == []
    for _ in range(3):
        assert submit(lab)[0] == 200
    assert submit(lab)[0] == 429 and len(kept_code(lab)) == 3, "what no job came to need goes again"
    key = {"idempotency-key": "12345678"}
    lab.ask("DELETE", f"/queue/{lab.ask('GET', '/queue')[1][0]['id']}")
    answers = [submit(lab, headers=key)[1]["job_id"] for _ in range(2)]
    assert answers[0] == answers[1] and len(kept_code(lab)) == 4


def test_only_allowed_scripts_may_be_submitted():
    with Bench(allowed_script_paths=["/"]) as bench:
        status, answer = submit(bench, "name: x", uid=OWNER)
        assert status == 403 and "code may not be given" in answer["message"] and not kept_code(bench)


def test_jobs_of_others_are_seen_from_outside(lab):
    mine, others = (submit(lab, config, uid=OWNER)[1]["job_id"] for config in (MINE + "project_id: p", "user_id: bob\nproject_id: p"))
    rows = lab.ask("GET", "/api/jobs", headers=MY_BEARER, uid=None)[1]
    assert [(row["job_id"], row["user_id"], row["project_id"], row["waiting_for"] is None) for row in rows] == [
        (mine, "myuser", "p", False), (others, "bob", None, True)]
    for path in ("/api/status/", "/api/results/"):
        assert lab.ask("GET", path + others, headers=MY_BEARER, uid=None)[0] == 403
        assert lab.ask("GET", path + mine, uid=OWNER + 1)[0] == 401 and lab.ask("GET", path + "nosuch")[0] == 404
        assert lab.ask("HEAD", path + mine)[0] == 200
    assert lab.ask("POST", f"/api/cancel/{others}", headers=MY_BEARER, uid=None)[0] == 403

    def list_ids(**query):
        return [row["job_id"] for row in lab.ask("GET", "/api/jobs", query=query)[1]]

    assert list_ids(user_id="bob") == [others] and list_ids(status="pending") == [mine, others] and list_ids(status="running") == []
    assert list_ids(limit="1") == [mine] and list_ids(user_id="x") == []
    assert lab.ask("GET", "/api/jobs", query={"status": "done"})[0] == 400 and lab.ask("GET", "/api/jobs", query={"user": "bob"})[0] == 400


def test_which_python(bench, tmp_path):
    bench.service.environ["PATH"] = str(tmp_path)
    (tmp_path / "bash").touch(mode=0o755)
    for name, command in (("python3", "python3 main.py"), ("python", "python main.py")):
        (tmp_path / name).touch(mode=0o755)
        job_id = submit(bench, "name: x", uid=OWNER)[1]["job_id"]
        assert bench.ask("GET", f"/jobs/{job_id}")[1]["command"] == command

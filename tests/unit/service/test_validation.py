"""What a submission becomes before it is a job."""

import contextlib
import json
import types

import makers
import pytest
from turns import ANN, submit

import nexus

# Models
LLM_CONFIG = {"default_requirement": 1.0, "models": {"qwen": 0.5, "large": 2}}

LLMS = [  # reason, what is asked, the GPUs it gets
    ("by --llm", {"llm": "qwen"}, 0.5), ("in the command", {"command": "python a.py --llm qwen"}, 0.5),
    ("with =", {"command": "python a.py --llm=large -v"}, 2), ("within quotes", {"command": "bash -c 'a.py --llm qwen'"}, 0.5),
    ("before a separator", {"command": "python a.py --llm qwen; ls"}, 0.5), ("another option", {"command": "a --llmx qwen"}, 1),
    ("one that is not named", {"llm": "other"}, 1),
    ("GPUs are said", {"llm": "qwen", "gpus": 1}, 1), ("--llm goes before the command", {"llm": "large", "command": "a --llm qwen"}, 2),
    ("no model", {}, 1),
]


@pytest.mark.parametrize("reason, job, gpus", LLMS, ids=[case[0] for case in LLMS])
def test_llm_shares(world, tmp_path, reason, job, gpus):
    (tmp_path / "llm.json").write_text(json.dumps(LLM_CONFIG))
    w = world(llm_config=str(tmp_path / "llm.json"))
    assert w.job(submit(w, job).ids[0]).gpus == gpus
    if "llm" in job:
        assert w.service.editor.edit(nexus.Choice([w.add(gpus=0)]), ANN, job)[0].gpus == gpus, "a change asks for the same"


def test_llm_shares_are_read_anew_and_faults_are_told(world, tmp_path):
    path = tmp_path / "llm.json"
    w = world(llm_config=str(path))
    for text, says in ((None, "is not there"), ("{", "llm.json"), ('{"modles": {}}', "modles"), ("[]", "object"),
                       ('{"models": {"qwen": 0.333}}', "models.qwen must be")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(nexus.NexusError, match=says) as refused:
            submit(w, {"llm": "qwen"})
        assert refused.value.kind == "usage" and ("default_requirement" in refused.value.hint) is (text is not None)
    for share in (0.5, 0.25):
        path.write_text(json.dumps({"models": {"qwen": share}}))
        assert w.job(submit(w, {"llm": "qwen"}).ids[0]).gpus == share

PARENTS = [  # reason, what the job has that submits, --env, what the new one gets
    ("nexus's own", {"NEXUS_JOB_PORT": "7"}, {}, {}),
    ("an older nexus's", {}, {}, {}),
    ("one that was set", {"NEXUS_JOB_PORT": "7"}, {"MASTER_PORT": "7"}, {"MASTER_PORT": "7"}),
    ("another", {"NEXUS_JOB_PORT": "9"}, {}, {"MASTER_PORT": "7", "PET_MASTER_PORT": "7"}),
    ("another of the two", {"NEXUS_JOB_PORT": "7", "MASTER_PORT": "8"}, {}, {"MASTER_PORT": "8"}),
]


@pytest.mark.parametrize("reason, parents, added, expected", PARENTS, ids=[case[0] for case in PARENTS])
def test_a_job_that_a_job_submits_does_not_get_its_port(world, reason, parents, added, expected):
    base = {"NEXUS_JOB_ID": "abc", "MASTER_PORT": "7", "PET_MASTER_PORT": "7", "A": "1", **parents}
    assert world(gpus=0).service.validator.make_environment(base, added)[1] == {"A": "1", **expected}


def test_bash_reads_only_some_of_the_commands_of_a_request(world, monkeypatch):
    w, asked = world(gpus=0), []
    monkeypatch.setattr(nexus, "run", lambda argv, *_: asked.append(argv[-1]) or types.SimpleNamespace(exit_code=0, output=""))
    commands = [f'echo "it\'s {number}"' for number in range(500)]
    w.service.validator.check_commands([makers.job(command=command) for command in [*commands, "true"] * 2])
    assert asked == commands[:100], "each once, and those whose quotes are in pairs not at all"
    monkeypatch.undo()
    with pytest.raises(nexus.NexusError, match="bash cannot read the command: unexpected EOF"):
        submit(w, {"command": "echo 'it", "gpus": 0})


RUNNABLE = [  # reason, the GPUs here (None: they cannot be read), those of n1 (None: no such node), what is asked, whether it is taken
    ("all that are here", 2, None, {"gpus": 2}, True), ("one more", 2, None, {"gpus": 3}, False),
    ("all that are there", 2, 3, {"gpus": 3}, True), ("more than a machine has", 2, 3, {"gpus": 4}, False),
    ("what is there, for here", 2, 3, {"gpus": 3, "node": "here"}, False),
    ("what is here, for there", 3, 2, {"gpus": 3, "node": "n1"}, False),
    ("those there are not known yet", 2, 0, {"gpus": 4}, True), ("nor are they asked for", 2, 0, {"gpus": 4, "node": "here"}, False),
    ("those here cannot be read", None, 3, {"gpus": 4}, True), ("nor are they asked for", None, 3, {"gpus": 4, "node": "n1"}, False),
]


@pytest.mark.parametrize("reason, here, there, asked, is_taken", RUNNABLE, ids=[f"{case[0]} {case[1]} {case[2]}" for case in RUNNABLE])
def test_what_no_machine_can_ever_run_is_refused(world, monkeypatch, reason, here, there, asked, is_taken):
    """A machine whose GPUs are unknown now may have them."""
    w = world(gpus=here or 0)
    if here is None:
        w.machine.shown = nexus.NexusError("unavailable", "nvidia-smi does not answer")
        w.probe()
    if there is not None:
        reports = types.SimpleNamespace(gpus=tuple(makers.gpu(index, node="n1") for index in range(there)))
        monkeypatch.setattr(w.service.pool, "nodes", {"n1": types.SimpleNamespace(reports=reports, name="n1")})
    monkeypatch.setattr(w.service, "node", "here")
    with contextlib.nullcontext() if is_taken else pytest.raises(nexus.NexusError) as refused:
        submit(w, asked)
    assert is_taken or (refused.value.kind == "usage" and f"{asked['gpus']} GPUs" in refused.value.message)


@pytest.mark.parametrize("gpus, waits", [(1, 1), (0, 0)])
def test_what_needs_gpus_waits_for_their_first_reading(world, monkeypatch, gpus, waits):
    w, waited = world(), []
    monkeypatch.setattr(w.service.gpu_watch, "first_probe", types.SimpleNamespace(wait=waited.append))
    submit(w, {"gpus": gpus})
    assert len(waited) == waits


ELSEWHERE = [  # reason, what is asked, what is told where there is no other machine, and where there is n1
    ("no directory", {"cwd": "/nowhere"}, "cwd /nowhere is not a directory", None),
    ("nor here", {"cwd": "/nowhere", "node": "here"}, "cwd /nowhere is not a directory", "cwd /nowhere is not a directory"),
]


@pytest.mark.parametrize("reason, asked, alone, beside", ELSEWHERE, ids=[case[0] for case in ELSEWHERE])
def test_what_this_machine_lacks_another_may_have(world, monkeypatch, reason, asked, alone, beside):
    w = world(gpus=0)
    monkeypatch.setattr(w.service, "node", "here")
    for nodes, told in (({}, alone), ({"n1": None}, beside)):
        monkeypatch.setattr(w.service.pool, "nodes", nodes)
        try:
            submit(w, {"gpus": 0, **asked})
        except nexus.NexusError as error:
            assert (error.kind, told and told in error.message) == ("usage", True), error
        else:
            assert told is None
    monkeypatch.setattr(w.machine, "has_bash", lambda: False)
    for nodes, kind in (({}, "unavailable"), ({"n1": None}, None)):
        monkeypatch.setattr(w.service.pool, "nodes", nodes)
        with contextlib.nullcontext() if kind is None else pytest.raises(nexus.NexusError) as refused:
            submit(w, {"gpus": 0})
        assert kind is None or refused.value.kind == kind


def test_a_directory_that_has_gone_meanwhile_is_no_matter_of_another_change(world, tmp_path):
    """It may be back when the job starts."""
    w = world(gpus=0)
    (tmp_path / "work").mkdir()
    job_id = w.add(gpus=0, cwd=str(tmp_path / "work"), is_held=True)
    (tmp_path / "work").rmdir()
    assert w.service.editor.edit(nexus.Choice([job_id]), ANN, {"name": "n", "gpus": 0})[0].name == "n"
    with pytest.raises(nexus.NexusError, match="work is not a directory"):
        w.service.editor.edit(nexus.Choice([job_id]), ANN, {"node": None})


@pytest.mark.parametrize("name", ["0", "n1:0", "0.1"])
def test_no_job_is_called_as_a_gpu(world, name):
    """`nexus pause 0` would mean either."""
    w = world(gpus=0)
    with pytest.raises(nexus.NexusError, match=f"the name {name} would be taken for a GPU") as refused:
        w.add(gpus=0, name=name)
    assert refused.value.kind == "usage"
    job_id = w.add(gpus=0, name=f"run-{name.replace(':', '-')}")
    with pytest.raises(nexus.NexusError, match="would be taken for a GPU"):
        w.service.editor.edit(nexus.Choice([job_id]), ANN, {"name": name})


NOT_IN_SLURM = [  # reason, what is asked, a part of what is told; None: it is taken
    ("a part of a GPU", {"gpus": 0.5}, "Slurm gives out whole ones"), ("whole ones", {"gpus": 2}, None),
    ("GPUs by their numbers", {"gpu_ids": [0]}, "wants gpu_ids, and which GPUs a job gets is Slurm's to choose"),
    ("a type that is none in Slurm", {"gpu_type": "RTX 3090"}, "which cannot be a type in Slurm"), ("a type", {"gpu_type": "a100"}, None),
]


@pytest.mark.parametrize("reason, asked, told", NOT_IN_SLURM, ids=[case[0] for case in NOT_IN_SLURM])
def test_what_slurm_can_never_run_is_refused(world, reason, asked, told):
    w = world(launcher="slurm")
    with contextlib.nullcontext() if told is None else pytest.raises(nexus.NexusError, match=f"the job .*{told}") as refused:
        submit(w, asked)
    assert told is None or (refused.value.kind, '[jobs] launcher is "slurm"' in refused.value.hint) == ("usage", True)


def test_in_another_environment_a_job_keeps_what_it_was_given(world):
    """The variables of --env and of its sweep, and none of the former shell."""
    w = world(gpus=0)
    row = {"command": "a 1", "env": {"SEED": "1"}}
    body = {"each": [row], "cwd": "/", "gpus": 0, "env": {"MODE": "off"}, "environment": {"PATH": "/bin", "OLD": "1"}}
    job_id, = w.service.admission.admit(nexus.parse_submissions([body]), ANN).ids
    w.service.editor.edit(nexus.Choice([job_id]), ANN, {"env": {"LATER": "1"}})
    digest = w.job(job_id).env_digest
    change = {"environment": {"PATH": "/v/bin:/bin", "VIRTUAL_ENV": "/v"}, "umask": 0o027, "cwd": "/tmp"}

    def see(job):
        return {**w.store.state.environments[job.environment], **dict(job.variables)}

    wanted = {"PATH": "/v/bin:/bin", "VIRTUAL_ENV": "/v", "MODE": "off", "LATER": "1", "SEED": "1"}
    w.service.editor.edit(nexus.Choice([job_id]), ANN, change)
    edited = w.job(job_id)
    assert (see(edited), edited.umask, edited.cwd, edited.env_digest) == (wanted, 0o027, "/tmp", digest)
    w.service.cancellation.cancel(nexus.Choice([job_id]), ANN)
    again, = w.service.admission.retry(nexus.Choice([job_id]), ANN, {**change, "environment": {"NEW": "1"}, "env": {"MODE": "on"}}).ids
    assert see(w.job(again)) == {"NEW": "1", "MODE": "on", "LATER": "1", "SEED": "1"}
    w.service.cancellation.cancel(nexus.Choice([again]), ANN)
    other, = w.service.admission.retry(nexus.Choice([again]), ANN).ids
    assert see(w.job(other)) == see(w.job(again)), "without --this-env it has all as before"


def test_variables_that_an_older_nexus_has_mixed_in_are_asked_for_again(world):
    w = world(gpus=0)
    job_id = w.add(gpus=0, env={"A": "1"})
    w.store.update(lambda state: [nexus.change_job(state.jobs[job_id], env_names=())])
    with pytest.raises(nexus.NexusError, match="did not keep their names"):
        w.service.editor.edit(nexus.Choice([job_id]), ANN, {"environment": {"B": "2"}})
    w.service.editor.edit(nexus.Choice([job_id]), ANN, {"environment": {"B": "2"}, "env": {"A": "1"}})
    assert w.store.state.environments[w.job(job_id).environment] == {"A": "1", "B": "2"}


def test_a_change_takes_what_belongs_to_the_former_value(world):
    """The values of a sweep go with its command, the repository with its snapshot; variables stay beside those that are changed."""
    w = world(gpus=0)
    row = {"command": "a 1", "sweep_values": {"x": "1"}, "env": {"A": "1", "B": "2"}}
    added = w.service.admission.admit(nexus.parse_submissions([{"each": [row], "cwd": "/", "gpus": 0, "env": {"C": "3"}}]), ANN)

    def edit(**change):
        return w.service.editor.edit(nexus.Choice(added.ids), ANN, change)[0]

    before = w.job(added.ids[0])
    changed = edit(env={"B": "4"})
    variables = {**w.store.state.environments[changed.environment], **dict(changed.variables)}
    assert {name: variables[name] for name in "ABC"} == {"A": "1", "B": "4", "C": "3"} and changed.env_digest != before.env_digest
    assert edit(name="n").sweep_values and not edit(command="a 2").sweep_values
    w.store.update(lambda state: [nexus.change_job(state.jobs[before.id], snapshot="a" * 40, snapshot_repo="/r", cwd="/nowhere")])
    with pytest.raises(nexus.NexusError, match="cwd /nowhere is not a directory"):
        edit(snapshot=None)
    w.store.update(lambda state: [nexus.change_job(state.jobs[before.id], cwd="/")])
    assert (edit(snapshot=None).snapshot_repo, w.job(before.id).snapshot) == (None, None)
    with pytest.raises(nexus.NexusError, match="cwd /nowhere is not a directory"):
        edit(cwd="/nowhere")

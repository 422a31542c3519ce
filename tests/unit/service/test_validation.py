"""What a submission becomes before it is a job."""

import json

import pytest
from turns import submit

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

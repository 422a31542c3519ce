"""Which variables a job, or a service that starts here, gets, and which not."""

import socket

import pytest
from makers import gpu, mig_slice, running

import nexus


@pytest.mark.parametrize("name", [
    "RUNNER_TRACKING_ID", "VSTS_PROCESS_LOOKUP_ID", "JENKINS_NODE_COOKIE", "JENKINS_SERVER_COOKIE", "HUDSON_SERVER_COOKIE", "HUDSON_COOKIE",
    "NEXUS_JOB_ID", "NEXUS_JOB_NONCE", "NEXUS_JOB_PORT", "NEXUS_GPU_ID", "NEXUS_TASK_ID", "NEXUS_SWEEP_lr", "STY", "WINDOW"])
def test_what_is_one_jobs_alone_is_not_inherited(name):
    """By the first of them CI systems find what to kill."""
    assert nexus.list_inherited({name: "1", "HOME": "/home/ann", "BUILD_ID": "7"}) == {"HOME": "/home/ann", "BUILD_ID": "7"}


ACTIVE = [  # reason, variables, the environment that is active
    ("none", {"PATH": "/usr/bin:/bin"}, None),
    ("a venv", {"PATH": "/v/bin:/usr/bin", "VIRTUAL_ENV": "/v"}, "venv /v"),
    ("a venv that PATH does not have: it was left", {"PATH": "/usr/bin", "VIRTUAL_ENV": "/v"}, None),
    ("conda, by its name", {"PATH": "/c/envs/ml/bin:/bin", "CONDA_PREFIX": "/c/envs/ml", "CONDA_DEFAULT_ENV": "ml"}, "conda ml"),
    ("conda that lacks a name", {"PATH": "/c/bin", "CONDA_PREFIX": "/c"}, "conda /c"),
    ("a venv in conda's: the first on PATH", {"PATH": "/v/bin:/c/bin", "VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c"}, "venv /v"),
    ("the other way round", {"PATH": "/c/bin:/v/bin", "VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c"}, "conda /c"),
    ("no PATH", {"VIRTUAL_ENV": "/v"}, None),
]


@pytest.mark.parametrize("reason, variables, active", ACTIVE, ids=[case[0] for case in ACTIVE])
def test_which_environment_is_active(reason, variables, active):
    assert nexus.find_python_env(variables) == active, reason


IN_JOB = {"NEXUS_JOB_ID": "abc", "NEXUS_JOB_PORT": "20001"}
PORTS = [  # reason, variables, those that are inherited
    ("a job's own port", {**IN_JOB, "MASTER_PORT": "20001", "PET_MASTER_PORT": "20001"}, {}),
    ("one that somebody has set there", {**IN_JOB, "MASTER_PORT": "29500"}, {"MASTER_PORT": "29500"}),
    ("outside of a job", {"MASTER_PORT": "29500"}, {"MASTER_PORT": "29500"}),
]


@pytest.mark.parametrize("reason, variables, inherited", PORTS, ids=[case[0] for case in PORTS])
def test_the_port_of_a_job_is_not_that_of_what_it_starts(reason, variables, inherited):
    assert nexus.list_inherited(variables) == inherited, reason


DEVICES = [  # reason, submitted, GPUs of the machine, indices of the job, what it holds
    ("indices", {}, [0, 1], (1,), {"CUDA_VISIBLE_DEVICES": "1", "NEXUS_GPU_ID": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                                   "NEXUS_JOB_ID": "abc"}),
    ("ranks where the indices have a gap", {}, [0, 2], (2,), {"CUDA_VISIBLE_DEVICES": "1", "NEXUS_GPU_ID": "2"}),
    ("no GPU sees none", {}, [0], (), {"CUDA_VISIBLE_DEVICES": "", "NEXUS_GPU_ID": ""}),
    ("what the submitter saw does not count", {"CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "NEXUS_GPU_ID": "7"},
     [0], (0,),
     {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NEXUS_GPU_ID": "0"}),
    ("unbuffered", {}, [0], (0,), {"PYTHONUNBUFFERED": "1"}),
    ("unless it says otherwise", {"PYTHONUNBUFFERED": ""}, [0], (0,), {"PYTHONUNBUFFERED": ""}),
    ("submitted from inside a job", {"NEXUS_JOB_ID": "xyz", "NEXUS_JOB_NONCE": "0", "NEXUS_ROLE": "service", "STY": "1.x",
                                     "WINDOW": "0"}, [0],
     (0,), {"NEXUS_JOB_ID": "abc", "NEXUS_JOB_NONCE": "cafe", "NEXUS_ROLE": None, "STY": None, "WINDOW": None}),
    ("a port for torchrun", {}, [0], (0,), {"MASTER_PORT": "20001", "PET_MASTER_PORT": "20001"}),
    ("it has one", {"MASTER_PORT": "7"}, [0], (0,), {"MASTER_PORT": "7", "PET_MASTER_PORT": "7"}),
    ("an empty one is none", {"MASTER_PORT": ""}, [0], (0,), {"MASTER_PORT": "20001", "PET_MASTER_PORT": "20001"}),
    ("torchrun has one", {"PET_MASTER_PORT": "7"}, [0], (0,), {"MASTER_PORT": "7", "PET_MASTER_PORT": "7"}),
]


@pytest.mark.parametrize("reason, submitted, indices, given_indices, expected", DEVICES, ids=[case[0] for case in DEVICES])
def test_build_environment(reason, submitted, indices, given_indices, expected):
    made = nexus.build_environment(running("abc", given_indices, nonce="cafe"), submitted, [gpu(index) for index in indices], 20001)
    assert {name: made.get(name) for name in expected} == expected
    assert list(made)[-5:] == ["CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "NEXUS_JOB_ID", "NEXUS_JOB_NONCE", "NEXUS_GPU_ID"], "last"


def test_jobs_that_run_at_once_have_ports_of_their_own():
    """Two torchruns on one box met at 29500."""
    ports = [nexus.find_free_port(number) for number in range(200)]
    assert len(set(ports)) == len(ports) and all(20000 <= port < 30000 for port in ports)
    with socket.socket() as line:
        line.bind(("", ports[7]))
        assert nexus.find_free_port(7) != ports[7], "somebody listens there"


@pytest.mark.parametrize("fields, numbers", [
    ({"gpu_uuids": ("MIG-1",), "gpu_slice": 1}, [0]), ({"indices": (1, 2)}, [0, 1]), ({"indices": (), "gpus": 0}, [])])
def test_where_a_card_is_cut_programs_count_what_they_see(fields, numbers):
    """There devices are UUIDs: a --cuda of the command is not for the driver's numbers."""
    one = running("abc", nonce="cafe", cuda_arg=True, command="python a.py --cuda 7", **fields)
    assert nexus.list_cuda_numbers(one, [mig_slice(0), mig_slice(1), gpu(1), gpu(2)]) == numbers

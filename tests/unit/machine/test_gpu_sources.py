"""GPUs as nvidia-smi shows them; it is the fake one."""

import json
import os
import sys

import pytest
from makers import SUPPORT, gpu

import nexus

# GPUs


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Sets what the fake nvidia-smi shows; `smi.runs()` are the arguments of its runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{SUPPORT}/fake_nvidia_smi" "$@"\n')
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NVIDIA_SMI_LOG", str(tmp_path / "runs"))
    monkeypatch.setenv("FAKE_NVIDIA_SMI", str(tmp_path / "state.json"))

    def show(shown):
        (tmp_path / "runs").write_text("")
        (tmp_path / "state.json").write_text(json.dumps(shown))

    show.runs = lambda: [json.loads(line)["argv"] for line in (tmp_path / "runs").read_text().splitlines()]
    return show


def uuid(index):
    return f"GPU-{index:08x}-0000-0000-0000-{index:012x}"


def known_gpus(*indices):
    return {uuid(index): gpu(index, uuid=uuid(index), memory_used_mib=5.0, utilization=1.0) for index in indices}

LOST, RESET, UNKNOWN, HIDDEN = ({"state": state} for state in ("lost", "reset", "unknown", "hidden"))

GPUS = [  # reason, what nvidia-smi shows, indices seen before, {index: fault} now
    ("two idle ones", {"gpus": 2}, (), {0: None, 1: None}),
    ("no GPU at all", {"gpus": []}, (), {}),
    ("one that may not be opened is left out, its index too", {"gpus": [{}, HIDDEN, {}]}, (), {0: None, 2: None}),
    ("it was there before", {"gpus": [{}, HIDDEN, {}]}, (0, 1, 2), {0: None, 1: "nvidia-smi does not show it", 2: None}),
    ("the only one was there before", {"gpus": []}, (0,), {0: "nvidia-smi does not show it"}),
    ("a lost one hides the others until they are asked for", {"gpus": [{}, LOST, {}]}, (0, 1, 2), {0: None, 1: "GPU is lost", 2: None}),
    ("one that was lost before the service started", {"gpus": [{}, LOST, {}]}, (), {0: None, 1: "GPU is lost", 2: None}),
    ("the first is lost", {"gpus": [LOST, {}]}, (), {0: "GPU is lost", 1: None}),
    ("one that cannot be opened", {"gpus": [{}, UNKNOWN]}, (), {0: None, 1: "Unknown Error"}),
    ("one that must be reset", {"gpus": [RESET, {}]}, (), {0: "GPU requires reset", 1: None}),
    ("one lost and one hidden", {"gpus": [{}, LOST, HIDDEN, {}]}, (), {0: None, 1: "GPU is lost", 3: None}),
    ("lost after it was opened: 0 MiB used, and not free", {"gpus": [{}, {"error": "GPU is lost", "memory.used": 0}]}, (),
     {0: None, 1: "GPU is lost"}),
    ("must be reset, beside exit code 0", {"gpus": [{"error": "GPU requires reset"}, {}]}, (), {0: "GPU requires reset", 1: None}),
    ("an unknown error in its cells", {"gpus": [{"error": "Unknown Error"}]}, (), {0: "Unknown Error"}),
    ("readings that are not known are no fault", {"gpus": [{"memory.used": None, "utilization.gpu": None, "memory.total": None}]}, (),
     {0: None}),
]


@pytest.mark.parametrize("reason, shown, before, expected", GPUS, ids=[case[0] for case in GPUS])
def test_query_gpus(smi, reason, shown, before, expected):
    smi(shown)
    found = nexus.NvidiaSmi().query_gpus(known_gpus(*before))
    assert {one.index: one.fault for one in found} == expected
    assert [one.index for one in found] == sorted(expected)
    for one in found:
        if one.fault:
            assert one.memory_used_mib is None and one.processes == (), "what a dead card reads is not known"
        else:
            assert one.uuid == uuid(one.index)

UNAVAILABLE = [  # reason, what nvidia-smi shows, indices seen before, words of message and hint
    ("no driver", {"failure": "no-driver"}, (), ["communicate with the NVIDIA driver", "exit code 9", "lsmod"]),
    ("no library", {"failure": "no-library"}, (), ["libnvidia-ml.so", "exit code 12"]),
    ("upgraded under a running kernel", {"failure": "mismatch"}, (0,), ["Driver/library version mismatch", "exit code 18", "reboot"]),
    ("no rights", {"failure": "no-permission"}, (), ["Insufficient Permissions", "exit code 4", "/dev/nvidia"]),
    ("a container lost its devices", {"failure": "unknown-error"}, (), ["Unknown Error", "exit code 255", "container"]),
    ("no output at all", {"failure": {"stdout": "", "exit": 1}}, (), ["no output", "exit code 1"]),
    ("the only one is lost", {"gpus": [LOST]}, (), ["GPU is lost", "exit code 15"]),
]


@pytest.mark.parametrize("reason, shown, before, words", UNAVAILABLE, ids=[case[0] for case in UNAVAILABLE])
def test_unknown_is_not_free(smi, reason, shown, before, words):
    smi(shown)
    with pytest.raises(nexus.NexusError) as caught:
        nexus.NvidiaSmi().query_gpus(known_gpus(*before))
    assert caught.value.kind == "unavailable"
    said = f"{caught.value.message} {caught.value.hint}"
    assert all(word in said for word in words), said


def asked_of(answer):
    """(what asks a driver that answers so, the arguments of each question)."""
    runs, smi = [], nexus.NvidiaSmi()

    def ask(*arguments):
        runs.append(arguments)
        return answer(next(word for word in arguments if word.startswith("--query")))

    smi.ask = ask
    return smi, runs

ROW = ", A10, 23028, 1, 0, 30, 10, 150, [N/A], Default\n"


def test_an_older_driver_is_asked_for_less_from_then_on():
    answers = {",".join(nexus.GPU_FIELDS): nexus.Completed(2, 'Field "mig.mode.current" is not a valid field to query.\n'),
               ",".join(nexus.BASIC_GPU_FIELDS): nexus.Completed(0, "0, GPU-1, Tesla K80, 11441, 3\n")}
    smi, runs = asked_of(lambda query: nexus.Completed(0, "") if "compute-apps" in query else answers[query.partition("=")[2]])
    for _ in range(2):
        assert [(one.name, one.memory_used_mib) for one in smi.query_gpus({})] == [("Tesla K80", 3.0)]
    assert len(runs) == 5, "the fields it refused are asked for once"


def test_an_inforom_warning_does_not_spoil_the_rows():
    smi, _ = asked_of(lambda query: nexus.Completed(14, ("GPU-1, 77, 500\n" if "apps" in query else "0, GPU-1" + ROW)
                                                    + "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"))
    found, = smi.query_gpus({})
    assert found.fault is None and found.processes == (nexus.GpuProcess(77, 500.0),)


def test_newer_drivers_show_the_others_beside_the_error():
    smi, runs = asked_of(lambda query: nexus.Completed(0, "GPU-2, 77, 500\n") if "apps" in query else nexus.Completed(
        255, f"0, GPU-0{ROW}Unable to determine the device handle for GPU1: Unknown Error\n2, GPU-2{ROW}"))
    found = smi.query_gpus({})
    assert {one.index: one.fault for one in found} == {0: None, 1: "Unknown Error", 2: None}
    assert found[2].processes and runs[-1][:2] == ("-i", "0,2"), "the processes of the healthy ones are asked for"


def test_processes_that_cannot_be_asked_for_make_all_unknown():
    smi, _ = asked_of(lambda query: nexus.Completed(*((255, "Unknown Error\n") if "apps" in query else (0, "0, GPU-1" + ROW))))
    with pytest.raises(nexus.NexusError, match="Unknown Error"):
        smi.query_gpus({})


def test_processes_are_told_with_their_gpu(smi):
    smi({"gpus": 3, "processes": [{"gpu": 0, "pid": 11, "memory": 100}, {"gpu": 0, "pid": 12, "memory": None},
                                  {"gpu": 2, "pid": 11, "memory": 300, "name": "a, b"}]})
    found = nexus.NvidiaSmi().query_gpus({})
    assert [[(process.pid, process.memory_mib) for process in one.processes] for one in found] == [
        [(11, 100.0), (12, None)], [], [(11, 300.0)]]


def test_processes_beside_a_lost_gpu(smi):
    smi({"gpus": [{}, LOST, {}], "processes": [{"gpu": 2, "pid": 11, "memory": 100}]})
    found = nexus.NvidiaSmi().query_gpus({})
    assert [len(one.processes) for one in found] == [0, 0, 1]
    assert [argv[:2] for argv in smi.runs() if "-i" in argv] == [["-i", "0,2"]] * 2, "by indexes: a UUID is looked for in every card"

PROGRAMS = [  # reason, how the program is made, words
    ("no right to run it", ("#!/bin/sh\n", 0o644), ["cannot be run", "Permission denied"]),
    ("no program at all", ("\0\0", 0o755), ["cannot be run"]),
    ("it crashes", ("#!/bin/sh\nkill -SEGV $$\n", 0o755), ["ended by signal 11"]),
]


@pytest.mark.parametrize("reason, made, words", PROGRAMS, ids=[case[0] for case in PROGRAMS])
def test_a_broken_nvidia_smi_is_named(tmp_path, monkeypatch, reason, made, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text(made[0])
    (tmp_path / "nvidia-smi").chmod(made[1])
    with pytest.raises(nexus.NexusError) as caught:
        nexus.NvidiaSmi().query_gpus({})
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words), caught.value.message

"""Section 5: what is read from and written for other programs and the disk."""

import contextlib
import io
import json
import os
import pathlib
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from makers import NOW, SAMPLES, changes, config, environments, job, jobs, json_values, state_facts, texts

import nexus

# The journal and state.json


@given(st.integers(0, 2**53), changes)
def test_a_change_survives_the_journal(seq, change):
    line = nexus.encode_change(seq, change)
    assert line.endswith("\n") and line.count("\n") == 1, "one line each"
    assert nexus.decode_change(line) == nexus.decode_change(line.encode()) == (seq, change)


@given(st.integers(0, 2**53), changes, st.data())
def test_a_torn_line_is_seen(seq, change, data):
    line = nexus.encode_change(seq, change).rstrip("\n")
    with pytest.raises(ValueError):
        nexus.decode_change(line[: data.draw(st.integers(0, len(line) - 1))])


def test_a_pending_job_takes_little_room():
    assert len(nexus.encode_change(1, nexus.JobAdded(job()))) < 300


WRONG_LINES = [  # reason, line
    ("nothing", ""), ("no JSON", "hello"), ("a number", "5"), ("a list", "[]"), ("a text", '"seq"'),
    ("nothing in it", "{}"), ("no change", '{"seq": 1}'), ("no number", '{"seq": "1", "state": {}}'),
    ("a job that is a list", '{"seq": 1, "job": []}'),
    ("a job without its fields", '{"seq": 1, "job": {"id": "abc"}}'),
    ("facts that are a list", '{"seq": 1, "id": "abc", "set": []}'),
    ("facts that are none", '{"seq": 1, "id": "abc", "set": null}'), ("no facts", '{"seq": 1, "id": "abc"}'),
    ("a state that is a text", '{"seq": 1, "state": "paused"}'),
    ("variables that are a number", '{"seq": 1, "digest": "d", "variables": 1}'),
    ("a status that is none", '{"seq": 1, "id": "abc", "set": {"status": "paused"}}'),
    ("an order of texts", '{"seq": 1, "id": "abc", "set": {"order": ["a"]}}'),
    ("as deep as nothing is", '{"seq": 1, "state": ' + "[" * 200000),
    ("NUL bytes, as a full disk leaves them", "\0" * 64),
]


@pytest.mark.parametrize("reason, line", WRONG_LINES, ids=[case[0] for case in WRONG_LINES])
def test_decode_change_refuses(reason, line):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_change(line)


near_changes = json_values | st.fixed_dictionaries({"seq": st.integers() | json_values}, optional={
    "job": json_values, "id": json_values, "set": json_values, "removed": json_values, "digest": json_values,
    "variables": json_values, "state": json_values})


@given(near_changes)
def test_decode_change_raises_nothing_else(body):
    with contextlib.suppress(KeyError, TypeError, ValueError):
        nexus.decode_change(json.dumps(body))


WRONG_JOBS = [  # reason, fields that are not as they should be
    ("an unknown status", {"status": "paused"}), ("an id that is a path", {"id": "../x"}),
    ("an id that is a number", {"id": 5}), ("an order of texts", {"order": ["a"]}), ("no order", {"order": None}),
    ("a field of another version", {"colour": "red"}),
]


@pytest.mark.parametrize("reason, fields", WRONG_JOBS, ids=[case[0] for case in WRONG_JOBS])
def test_decode_job_refuses(reason, fields):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_job({**nexus.encode_job(job()), **fields}, {})


snapshots = st.builds(
    nexus.Snapshot, st.integers(0, 2**53), texts, texts, texts, st.integers(1, 2**53),
    st.fixed_dictionaries(state_facts), st.dictionaries(texts, environments, max_size=3), st.lists(jobs, max_size=4))


def lines_of(text):
    """As a file gives them."""
    return list(io.StringIO(text))


@given(snapshots)
def test_a_snapshot_survives_state_json(snapshot):
    text = "".join(nexus.encode_snapshot(snapshot))
    assert nexus.decode_snapshot(lines_of(text)) == snapshot
    assert nexus.decode_snapshot(io.StringIO(text)) == snapshot, "also read from the file, line by line"
    assert json.loads(text)["seq"] == snapshot.seq, "it is JSON, for others to read"
    assert text.count("\n") > len(snapshot.jobs), "a job a line, for people to read"


LAYOUTS = [  # what other programs make of it
    {}, {"indent": 0}, {"indent": 1}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")},
    {"ensure_ascii": False}, {"sort_keys": True}, {"sort_keys": True, "indent": 0},
]


@given(snapshots, st.sampled_from(LAYOUTS), st.sampled_from(["", "\n", "\n\n"]))
def test_a_snapshot_survives_other_programs_layout(snapshot, layout, end):
    text = json.dumps(json.loads("".join(nexus.encode_snapshot(snapshot))), **layout) + end
    assert nexus.decode_snapshot(lines_of(text)) == snapshot


def test_a_snapshot_that_was_edited_by_hand_says_so():
    text = "".join(nexus.encode_snapshot(nexus.Snapshot(7, "h", "m", "s", 2, {
        "paused": False, "paused_gpus": (), "inventory": ()}, {"d": {"A": "1"}}, [job()])))
    edited = text.replace('"paused": false', '"paused": true')
    assert nexus.decode_snapshot(lines_of(edited)).facts["paused"] is True
    with pytest.raises(ValueError):
        nexus.decode_snapshot(lines_of(text.replace('"paused": false,', '"paused": true')))


@given(snapshots, st.data())
def test_a_torn_snapshot_is_seen(snapshot, data):
    text = "".join(nexus.encode_snapshot(snapshot))
    cut = data.draw(st.integers(0, len(text) - 2) | st.sampled_from(
        [match.end() for match in re.finditer("\n", text[:-1])]))       # most likely at a line's end
    for lines in (lines_of(text[:cut]), io.StringIO(text[:cut])):
        with pytest.raises((KeyError, TypeError, ValueError)):
            nexus.decode_snapshot(lines)


WRONG_SNAPSHOTS = [  # reason, text
    ("nothing", ""), ("a list", "[]"), ("a text", '"x"'), ("nothing in it", "{}"),
    ("an older or newer version", '{"version": 99}'),
    ("as deep as nothing is", "[" * 200000),
    ("jobs that are lists",
     '{"version": 1, "seq": 1, "host": "", "machine_id": "", "service_id": "", "next_number": 1, '
     '"paused": false, "paused_gpus": [], "inventory": [], "environments": {}, "jobs": [[]]}'),
]


@pytest.mark.parametrize("reason, text", WRONG_SNAPSHOTS, ids=[case[0] for case in WRONG_SNAPSHOTS])
def test_decode_snapshot_refuses(reason, text):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_snapshot(lines_of(text))


@given(json_values | st.fixed_dictionaries({}, optional={
    "version": st.just(1), "seq": st.integers(), "host": texts, "machine_id": texts, "service_id": texts,
    "next_number": st.integers(), "paused": st.booleans(), "paused_gpus": json_values, "inventory": json_values,
    "environments": json_values, "jobs": json_values}))
def test_decode_snapshot_raises_nothing_else(body):
    with contextlib.suppress(KeyError, TypeError, ValueError):
        nexus.decode_snapshot(lines_of(json.dumps(body)))


# nvidia-smi.  samples/nvidia_smi/index.md says of each recorded answer what a correct parser concludes.

INDEX = (SAMPLES / "nvidia_smi" / "index.md").read_text()
RECORDED = set(re.findall(r"^\| `(\w+)` \|", INDEX, re.MULTILINE))
COMMANDS = dict(re.findall(r"^- `(\w+)`: `(.*)`$", INDEX, re.MULTILINE))
JETSON_FIELDS = ["index", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "power.draw"]
MIG = "is cut into MIG slices"
U = "GPU-0000000{}-1111-2222-3333-444444444444".format


def sample(case):
    return (SAMPLES / "nvidia_smi" / f"{case}.stdout").read_text()


def exit_code(case):
    return int((SAMPLES / "nvidia_smi" / f"{case}.exit").read_text())


def fields_of(case):
    if case == "jetson_orin":
        return JETSON_FIELDS
    return re.search(r"--query-(?:gpu|compute-apps)=(\S+)", COMMANDS[case])[1].split(",")


GPUS = [  # case, what is concluded, {index: (uuid, name, total, used, utilization, obstacle)}, messages
    ("h200_idle", "idle; headings carry units",
     {0: ("GPU-7734d7c1-613a-5e8b-f397-5f52cb008853", "H200", 143771, 0, 0, None)}, 0),
    ("h200_busy_nounits", "under load; its processes say whose",
     {0: ("GPU-fb710734-e7ee-50a3-07ae-1e7d102b938b", "H200", 143771, 32362, 100, None)}, 0),
    ("h100_idle_noheader", "the first line is a GPU here, units in its cells",
     {0: ("GPU-09208a65-7bdf-0f66-ed88-e18d5387f613", "H100 80GB HBM3", 81559, 0, 0, None)}, 0),
    ("l40s_idle_reads_100pct", "idle: 100 % is the query itself, no memory and no process decide",
     {0: ("GPU-4b4d8474-025a-2b83-ea27-8e6ba7a11490", "L40S", 46068, 0, 100, None)}, 0),
    ("rtx2080s_desktop_idle", "free for a job, although the desktop has 214 MiB",
     {0: ("GPU-4105cca7-7596-93fd-0f3b-3742c42b7170", "RTX 2080 SUPER", 8192, 214, 0, None)}, 0),
    ("h100_mig_idle", "a process would get one slice only",
     {0: ("GPU-ec3fbf4d-44e9-7e26-33bc-1eaa02cdf2af", "H100 80GB HBM3", 81559, 59, None, MIG)}, 0),
    ("b200_x8", "eight, all idle", {
        0: ("GPU-367e5d6d-8a22-9bb8-0a0d-5fe635f11af2", "B200", 183359, 0, 0, None),
        1: ("GPU-19af685d-4aef-6d2e-e211-04e7421e7a60", "B200", 183359, 0, 0, None),
        2: ("GPU-4bdbf090-2594-2608-2e23-7c6ca2f7647a", "B200", 183359, 0, 0, None),
        3: ("GPU-5e617f8e-e80a-4123-f7aa-5d9b62d74145", "B200", 183359, 0, 0, None),
        4: ("GPU-a0931ed4-9f22-74ee-7fbe-612db9b338eb", "B200", 183359, 0, 0, None),
        5: ("GPU-8dce6f52-c6c3-f70c-2830-18456be49ee7", "B200", 183359, 0, 0, None),
        6: ("GPU-1a953cca-13d0-82a6-7a10-839364409ddb", "B200", 183359, 0, 0, None),
        7: ("GPU-7db224cb-59d2-2336-40b7-f5663a782ebb", "B200", 183359, 0, 0, None)}, 0),
    ("gtx1080ti_1060_mixed", "no index was asked for, so none is made up", {}, 2),
    ("rtx2080_440_bare_na", "no index was asked for", {}, 1),
    ("old_driver_not_supported", "no index was asked for", {}, 1),
    ("mig_in_container_no_permission", "no index was asked for", {}, 1),
    ("gb10_dgx_spark", "usable, of unknown memory: not 0, no error, not dropped",
     {0: ("index-0", "GB10", None, None, None, None)}, 0),
    ("jetson_orin", "usable, nothing known but its name, which has parentheses",
     {0: ("index-0", "Orin (nvgpu)", None, None, None, None)}, 0),
    ("h100_requires_reset", "unusable, although its memory reads 0 and the exit code is 0",
     {0: ("index-0", "GPU", None, 0, None, "is unusable (GPU requires reset)")}, 0),
    ("handle_error_between_rows", "GPUs 0 and 2; the error line and the row without an index belong to none", {
        0: ("index-0", "RTX 3090", None, None, None, None), 2: ("index-2", "RTX 3090", None, None, None, None)}, 2),
    ("healthy_by_index_beside_lost", "the healthy ones answer when asked by index", {
        0: (U(0), "RTX 3090", 24576, 11, 0, None), 2: (U(2), "RTX 3090", 24576, 11, 0, None)}, 0),
    ("fields_lost", "GPU 1 is told by its uuid, since even its index cell is an error", {
        0: (U(0), "RTX 3090", 24576, 11, 0, None), 1: (U(1), "RTX 3090", None, None, None, "is unusable (GPU is lost)"),
        2: (U(2), "RTX 3090", 24576, 11, 0, None)}, 0),
    ("index_gap_hidden_gpu", "the place of a row is not its index", {
        0: (U(0), "RTX 3090", 24576, 11, 0, None), 2: (U(2), "RTX 3090", 24576, 11, 0, None)}, 0),
    ("hang_after_first_row", "what came before it hung; who asked discards it",
     {0: (U(0), "RTX 3090", 24576, 11, 0, None)}, 0),
    ("no_driver", "no answer about any GPU", {}, 1),
    ("driver_library_mismatch", "no answer about any GPU", {}, 2),
    ("nvml_unknown_error", "no answer about any GPU", {}, 1),
    ("no_devices", "no GPU", {}, 1),
    ("one_lost_of_three", "no row, not even of the healthy ones", {}, 1),
    ("bad_field", "no answer about any GPU", {}, 1),
]
KNOWN = {U(0): 0, U(1): 1, U(2): 2}


@pytest.mark.parametrize("case, reason, expected, message_count", GPUS, ids=[case[0] for case in GPUS])
def test_parse_gpus(case, reason, expected, message_count):
    gpus, messages = nexus.parse_gpus(sample(case), fields_of(case), KNOWN)
    found = {gpu.index: (gpu.uuid, gpu.name, gpu.memory_total_mib, gpu.memory_used_mib, gpu.utilization,
                         nexus.find_obstacle(gpu, config().gpu)) for gpu in gpus}
    assert found == expected, reason
    assert [gpu.index for gpu in gpus] == sorted(found)
    assert len(messages) == message_count, messages


def test_a_lost_gpu_that_was_never_seen_whole_is_a_message():
    gpus, messages = nexus.parse_gpus(sample("fields_lost"), fields_of("fields_lost"), {})
    assert [gpu.index for gpu in gpus] == [0, 2]
    assert len(messages) == 1 and U(1) in messages[0] and "GPU is lost" in messages[0]


def test_a_gpu_that_is_lost_between_two_samples():
    gpus, messages = nexus.parse_gpus(sample("loop_lost_midway"), fields_of("loop_lost_midway"), KNOWN)
    assert [(gpu.index, gpu.memory_used_mib, gpu.fault) for gpu in gpus] == [
        (0, 11, None), (0, 11, None), (0, 11, None), (1, 11, None), (1, None, "GPU is lost"), (1, None, "GPU is lost")]
    assert messages == []


def test_other_readings_of_a_loaded_gpu():
    gpu = nexus.parse_gpus(sample("h200_busy_nounits"), fields_of("h200_busy_nounits"), {})[0][0]
    assert (gpu.temperature, gpu.power_watts, gpu.is_mig) == (52, 627.40, False)


ROWS = [  # case, what is concluded, cells by row
    ("gtx1080ti_1060_mixed", "columns are told by their place, not by the name that was asked for", [
        {"name": "GeForce GTX 1080 Ti", "memory.used": "2856 MiB", "clocks.gr": "1936 MHz"},
        {"name": "GeForce GTX 1060 6GB", "memory.used": "4 MiB", "clocks.gr": "139 MHz"}]),
    ("rtx2080_440_bare_na", "a name with blanks; N/A without brackets", [
        {"name": "GeForce RTX 2080", "uuid": "GPU-de17b009-db9d-11f9-5885-ab85887aae6a", "temperature.memory": "N/A",
         "memory.total": "7979", "pstate": "P2"}]),
    ("old_driver_not_supported", "the fan is unknown, everything else is read", [
        {"memory.total": "2004", "memory.used": "0", "temperature.gpu": "44", "fan.speed": "[Not Supported]",
         "utilization.gpu": "0", "utilization.memory": "0"}]),
    ("mig_in_container_no_permission", "a cell with a blank in its brackets", [
        {"name": "NVIDIA A100-SXM4-80GB", "temperature.gpu": "47", "memory.used": "[Insufficient Permissions]",
         "memory.total": "[Insufficient Permissions]"}]),
]


@pytest.mark.parametrize("case, reason, expected", ROWS, ids=[case[0] for case in ROWS])
def test_parse_csv_rows(case, reason, expected):
    rows, messages = nexus.parse_csv_rows(sample(case), fields_of(case))
    assert [{name: row[name] for name in wanted} for row, wanted in zip(rows, expected)] == expected, reason
    assert len(rows) == len(expected) and messages == []


READINGS = [  # cell, number
    ("24576 MiB", 24576), ("24576", 24576), ("0 %", 0), ("627.40 W", 627.4), ("627.40", 627.4), ("1936 MHz", 1936),
    ("-3", -3), ("[N/A]", None), ("N/A", None), ("[Not Supported]", None), ("[Insufficient Permissions]", None),
    ("[Not Found]", None), ("[Function Not Found]", None), ("[GPU is lost]", None), ("[GPU requires reset]", None),
    ("[Unknown Error]", None),
    ("", None), (None, None), ("P8", None), ("Enabled", None), ("1 2", None), ("1e9", None), ("nan", None),
]


@pytest.mark.parametrize("cell, number", READINGS)
def test_parse_reading(cell, number):
    assert nexus.parse_reading(cell) == number


LISTS = [  # case, what is concluded, GPUs
    ("h100_mig_list", "one card; its slices are no GPUs",
     [(0, "GPU-ea7f7301-f0ed-4c1f-e15d-e0fb38ae994e", "H100 80GB HBM3")]),
    ("one_lost_list", "the others, with their own indices", [
        (1, "GPU-2080f2ac-de0a-f3fc-a269-62051bce1a9b", "RTX 2080 Ti"),
        (2, "GPU-429df542-0baa-123d-6361-745b27d0c0a4", "RTX 2080 Ti"),
        (3, "GPU-48b988aa-b5f0-7d2a-ff65-ffd51ad9c6d8", "RTX 2080 Ti")]),
    ("mixed_list", "two kinds", [
        (0, "GPU-120fb44e-365c-0c71-132a-4b097b34f6d9", "A10"), (1, "GPU-3087bbf9-3ada-6867-5850-50e8d71848a1", "A10"),
        (2, "GPU-fd846420-30c4-1fb7-44d6-27bb764a44b4", "Tesla T4"),
        (3, "GPU-c3c4b8a0-a755-c821-ef15-dc335ac51cc8", "Tesla T4")]),
]


@pytest.mark.parametrize("case, reason, expected", LISTS, ids=[case[0] for case in LISTS])
def test_parse_gpu_list(case, reason, expected):
    assert nexus.parse_gpu_list(sample(case)) == expected, reason


APPS = [  # case, what is concluded, {uuid: [(pid, MiB)]}
    ("h200_apps_load", "three on one GPU, a relative name among them",
     {"GPU-e94ae4a7-51f0-cfaf-4434-a8eae583fa5d": [(10291, 2646), (10293, 1575), (10309, 28280)]}),
    ("apps_none", "a heading only: nothing runs", {}),
    ("apps_two", "a pid may be on several GPUs",
     {U(0): [(3000, 1234), (3001, 1234)], U(1): [(3000, 1234), (3001, 1234)]}),
    ("apps_name_not_found", "in use, though its process cannot be seen from here", {U(0): [(3000, 1234)]}),
]


@pytest.mark.parametrize("case, reason, expected", APPS, ids=[case[0] for case in APPS])
def test_parse_compute_apps(case, reason, expected):
    found = nexus.parse_compute_apps(sample(case), fields_of(case))
    assert {uuid: [(one.pid, one.memory_mib) for one in line] for uuid, line in found.items()} == expected, reason
    assert all(one.job_id is None for line in found.values() for one in line), "nvidia-smi does not say whose it is"


def test_a_compute_process_of_unknown_memory_is_one():
    text = f"gpu_uuid, pid, used_gpu_memory [MiB]\n{U(0)}, 77, [N/A]\n[GPU is lost], [GPU is lost], [GPU is lost]\n"
    assert nexus.parse_compute_apps(text) == {U(0): (nexus.GpuProcess(77, None),)}


FAILURES = [  # case, sentence: the first line, and the code
    ("no_driver",
     "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
     "latest NVIDIA driver is installed and running. (exit code 9)"),
    ("driver_library_mismatch",
     "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch (exit code 18)"),
    ("nvml_unknown_error", "nvidia-smi: Failed to initialize NVML: Unknown Error (exit code 255)"),
    ("no_devices", "nvidia-smi: No devices were found (exit code 6)"),
    ("one_lost_of_three",
     "nvidia-smi: Unable to determine the device handle for GPU1: GPU is lost.  Reboot the system to recover "
     "this GPU (exit code 15)"),
    ("bad_field", 'nvidia-smi: Field "bogus" is not a valid field to query. (exit code 2)'),
]


@pytest.mark.parametrize("case, sentence", FAILURES, ids=[case[0] for case in FAILURES])
def test_describe_smi_failure(case, sentence):
    assert nexus.describe_smi_failure(exit_code(case), sample(case)) == sentence


def test_describe_smi_failure_without_a_word():
    assert nexus.describe_smi_failure(-9, "") == "nvidia-smi was ended by signal 9"
    assert nexus.describe_smi_failure(1, "\n") == "nvidia-smi: no output (exit code 1)"


def test_every_recorded_case_is_tested():
    tested = [case[0] for table in (GPUS, LISTS, APPS, FAILURES) for case in table] + ["loop_lost_midway"]
    assert set(tested) == RECORDED == {path.stem for path in (SAMPLES / "nvidia_smi").glob("*.stdout")}


cells = st.one_of(
    st.integers(0, 99999).map(str), st.sampled_from([
        "0", "1", "²", "٣", "-1", "[N/A]", "N/A", "[GPU is lost]", "[Unknown Error]", "", " ", "NVIDIA H200", "name",
        "index", "memory.used [MiB]", "81559 MiB", "42.5 W", "9" * 5000, U(0), U(1), "GPU-1", "uuid",
        "Enabled"]), texts)
csv_lines = st.lists(cells, min_size=1, max_size=10).map(", ".join)
smi_texts = st.lists(csv_lines | st.sampled_from(sample("fields_lost").splitlines()) | texts, max_size=6).map("\n".join)


@given(smi_texts, st.sampled_from([
    nexus.GPU_FIELDS, nexus.BASIC_GPU_FIELDS, ("index",), ("index", "name", "uuid"), ("name",)]))
@example("²", ("index",))
@example("9" * 5000, ("index",))
def test_no_text_makes_parse_gpus_fail_or_invent_a_gpu(text, fields):
    gpus, messages = nexus.parse_gpus(text, fields, {U(1): 1})
    rows = [[cell.strip() for cell in line.split(", ")] for line in text.splitlines()]
    said = [dict(zip(fields, row)) for row in rows if len(row) == len(fields)]
    for gpu in gpus:
        assert any(is_said(gpu.index, row) for row in said)
    assert len(gpus) + len([*filter(None, messages)]) <= len([line for line in text.splitlines() if line.strip()])


def is_said(index, row):
    cell = row.get("index", "")
    return int(cell[:99]) == index if cell.isdecimal() else cell and row.get("uuid") == U(1) and index == 1


@given(smi_texts)
@example(f"{U(0)}, ², 1 MiB")
@example(f"{U(0)}, {'9' * 5000}, 1 MiB")
def test_no_text_makes_parse_compute_apps_fail(text):
    for uuid, processes in nexus.parse_compute_apps(text).items():
        assert uuid in text and all(str(one.pid) in text or not text.isascii() for one in processes)


@given(smi_texts | st.lists(st.sampled_from(sample("one_lost_list").splitlines()) | texts, max_size=6).map("\n".join))
@example(f"GPU {'9' * 5000}: NVIDIA H200 (UUID: GPU-1)")
@example("GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU ²: x (UUID: y)")
def test_no_text_makes_parse_gpu_list_fail(text):
    for index, uuid, _ in nexus.parse_gpu_list(text):
        assert uuid in text and (str(index) in text or not text.isascii())


@given(st.integers(-64, 255), texts)
def test_every_failure_is_one_line(code, text):
    assert "\n" not in nexus.describe_smi_failure(code, text)


# /proc, screen, the runner's files

PROC_STATS = [  # reason, text, process
    ("as usual", "8852 (cat) R 8816 8817 7030 0 -1 4194304 103 0 0 0 0 0 0 0 20 0 1 0 267381 3796992 417 "
     "18446744073709551615 94546284728320 94546284748201 140731867474400 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 "
     "94546284764208 94546284765824 94547054710784 140731867482813 140731867482836 140731867482837 140731867484139 0\n",
     nexus.Process(8852, 267381, 8816, 7030, "R", 140731867482837)),
    ("a name that looks like the rest",
     "8857 (a) R 1 (b c) S 8816 8816 7030 0 -1 4194304 147 0 0 0 0 0 0 0 20 0 1 0 267402 2990080 426 "
     "18446744073709551615 94629136044032 94629136061961 140721545151808 0 0 0 0 6 0 1 0 0 17 1 0 0 0 0 0 "
     "94629136076048 94629136077312 94629341863936 140721545157305 140721545157324 140721545157325 140721545158631 0\n",
     nexus.Process(8857, 267402, 8816, 7030, "S", 140721545157325)),
    ("ended, not yet waited for, and nobody else's business",
     "9 (x) Z 1 9 9 0 -1 4227084 103 0 0 0 0 0 0 0 20 0 1 0 5 0 0 "
     "18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
     nexus.Process(9, 5, 1, 9, "Z", 0)),
]


@pytest.mark.parametrize("reason, text, process", PROC_STATS, ids=[case[0] for case in PROC_STATS])
def test_parse_proc_stat(reason, text, process):
    assert nexus.parse_proc_stat(text) == process, reason


def test_parse_proc_stat_of_this_very_system():
    with open("/proc/self/stat") as file:
        process = nexus.parse_proc_stat(file.read())
    assert (process.pid, process.parent, process.session) == (os.getpid(), os.getppid(), os.getsid(0))


SCREENS = [  # reason, text, sessions
    ("none", (SAMPLES / "screen" / "4.9.0_none.stdout").read_text(), []),
    ("one attached; a name with dots and blanks", (SAMPLES / "screen" / "4.9.0_three.stdout").read_text(), [
        (8822, "nexus_job_abc", "Attached"), (8825, "nexus", "Detached"), (8828, "with.dots and blanks", "Detached")]),
    ("one was killed", (SAMPLES / "screen" / "4.9.0_dead.stdout").read_text(), [
        (8822, "nexus_job_abc", "Detached"), (8825, "nexus", "Detached"), (8835, "nexus_job_dead", "Dead ???"),
        (8828, "with.dots and blanks", "Detached")]),
    ("no date, as before 4.2", "There is a screen on:\n\t123.nexus\t(Detached)\n1 Socket in /run/screen/S-ann.\n",
     [(123, "nexus", "Detached")]),
    ("another language's date", "There is a screen on:\n\t123.nexus\t(24.10.2024 15:30:15)\t(Multi, attached)\n",
     [(123, "nexus", "Multi, attached")]),
    ("a session without a name of ours", "\tnexus\t(Detached)\n\t12.\t(Detached)\n", []),
    ("nothing", "", []),
]


@pytest.mark.parametrize("reason, text, sessions", SCREENS, ids=[case[0] for case in SCREENS])
def test_parse_screen_list(reason, text, sessions):
    assert nexus.parse_screen_list(text) == sessions, reason


@given(texts)
@example("\t" + "9" * 5000 + ".nexus\t(Detached)")
def test_no_text_makes_parse_screen_list_fail(text):
    nexus.parse_screen_list(text)


RESULTS = [  # reason, text, result
    ("done", '{"exit_code": 0, "finished_at": 1729783815.25, "runtime_seconds": 60.5}',
     nexus.Result(0, 1729783815.25, 60.5)),
    ("a whole second", '{"exit_code": 137, "finished_at": 1729783815, "runtime_seconds": 0}',
     nexus.Result(137, NOW, 0.0)),
    ("it could not be started",
     '{"exit_code": null, "finished_at": 1, "runtime_seconds": 0, "cause": "launch", "cause_line": "cd: no"}',
     nexus.Result(None, 1.0, 0.0, "launch", "cd: no")),
]


@pytest.mark.parametrize("reason, text, result", RESULTS, ids=[case[0] for case in RESULTS])
def test_parse_result(reason, text, result):
    assert nexus.parse_result(text) == result, reason


NO_RESULTS = [  # reason, text
    ("empty, as a full disk leaves it", ""), ("cut off", '{"exit_code": 0, "fini'), ("no object", "0"),
    ("a list", "[0]"), ("nothing in it", "{}"), ("no time", '{"exit_code": 0}'),
    ("a code no process has", '{"exit_code": 256, "finished_at": 1, "runtime_seconds": 1}'),
    ("a code as a text", '{"exit_code": "0", "finished_at": 1, "runtime_seconds": 1}'),
    ("a time that is none", '{"exit_code": 0, "finished_at": null, "runtime_seconds": 1}'),
    ("as deep as nothing is", "[" * 200000),
]


@pytest.mark.parametrize("reason, text", NO_RESULTS, ids=[case[0] for case in NO_RESULTS])
def test_parse_result_refuses(reason, text):
    with pytest.raises((ValueError, TypeError)):
        nexus.parse_result(text)


SAYINGS = [  # reason, line, saying
    ("a job began", "start abc 1 4242 267381\n", nexus.Saying("start", "abc", 1, ("4242", "267381"))),
    ("and ended", "end abc 2 137 6050", nexus.Saying("end", "abc", 2, ("137", "6050"))),
    ("its directory is gone", "fail abc 3 cwd", nexus.Saying("fail", "abc", 3, ("cwd",))),
    ("its GPU was taken by another user's", "bounce abc 1 bob", nexus.Saying("bounce", "abc", 1, ("bob",))),
    ("nothing", "", None), ("one word", "end", None), ("another verb", "begin abc 1 2 3", None),
    ("no id", "end 123 1 0 5", None), ("no attempt", "end abc x 0 5", None), ("half a line", "end abc 1 0", None),
    ("two lines in one", "end abc 1 0 5end abd 1 0 5", None),
    ("a code that is none", "end abc 1 x 5", None), ("a digit that is no number", "end abc ² 0 5", None),
    ("nor a code", "end abc 1 ² 5", None), ("a number without end", f"end abc {'9' * 5000} 0 5", None),
]


@pytest.mark.parametrize("reason, line, saying", SAYINGS, ids=[case[0] for case in SAYINGS])
def test_parse_saying(reason, line, saying):
    assert nexus.parse_saying(line) == saying, reason


@given(texts | st.lists(st.sampled_from(["start", "end", "bounce", "fail", "abc", "1", "²", "٣", "\0", "-1"]),
                        max_size=7).map(" ".join))
def test_no_line_makes_parse_saying_fail(line):
    said = nexus.parse_saying(line)
    assert said is None or (said.verb in ("start", "end", "bounce", "fail") and nexus.is_job_id(said.job_id))
    assert said is None or said.verb in ("bounce", "fail") or all(int(word) >= 0 for word in said.words)


COMMAND_FILES = [  # reason, text, commands
    ("one a line", "a\nb\n", ["a", "b"]),
    ("no line end at the end", "a\nb", ["a", "b"]),
    ("empty lines and comments", "# first\n\na\n   \n  # b\nc # d\n", ["a", "c # d"]),
    ("written on Windows", "\ufeffa\r\nb\r\n", ["a", "b"]),
    ("blanks around it", "  a b \t\n", ["a b"]),
    ("nothing", "", []),
    ("a line is a line to the shell: other separators of Unicode are text", "echo 'a\u2028b\x85c\x0cd'\n",
     ["echo 'a\u2028b\x85c\x0cd'"]),
]


@pytest.mark.parametrize("reason, text, commands", COMMAND_FILES, ids=[case[0] for case in COMMAND_FILES])
def test_parse_commands(reason, text, commands):
    assert nexus.parse_commands(text) == commands, reason


def test_the_fake_nvidia_smi_is_here():
    fake = pathlib.Path(__file__).with_name("fake_nvidia_smi")
    assert fake.stat().st_mode & 0o111 and fake.read_text().startswith("#!")

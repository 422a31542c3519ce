"""What nvidia-smi prints.  samples/nvidia_smi/index.md says of each recorded answer what a correct parser concludes."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from makers import SAMPLES, config, texts

import nexus

INDEX = (SAMPLES / "nvidia_smi" / "index.md").read_text()
RECORDED = set(re.findall(r"^\| `(\w+)` \|", INDEX, re.MULTILINE))
COMMANDS = dict(re.findall(r"^- `(\w+)`: `(.*)`$", INDEX, re.MULTILINE))
JETSON_FIELDS = ["index", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu", "power.draw"]
MIG = "is in MIG mode without slices (sudo nvidia-smi mig -cgi PROFILE -C makes them)"
U = "GPU-0000000{}-1111-2222-3333-444444444444".format


def sample(case):
    return (SAMPLES / "nvidia_smi" / f"{case}.stdout").read_text()


def rows(case):
    """Some were recorded without noheader."""
    return re.sub(r"\A(index|name|uuid|gpu_uuid|memory\.\w+( \[\w+\])?), .*\n", "", sample(case))


def fields_of(case):
    if case == "jetson_orin":
        return JETSON_FIELDS
    return [{"gpu_name": "name", "used_gpu_memory": "used_memory"}.get(field, field)
            for field in re.search(r"--query-(?:gpu|compute-apps)=(\S+)", COMMANDS[case])[1].split(",")]


GPUS = [  # case, what is concluded, {index: (uuid, name, total, used, utilization, obstacle)}, messages
    ("h200_idle", "idle; headings carry units",
     {0: ("GPU-7734d7c1-613a-5e8b-f397-5f52cb008853", "H200", 143771, 0, 0, None)}, 0),
    ("h200_busy_nounits", "under load; its processes, which are asked for apart, say whose",
     {0: ("GPU-fb710734-e7ee-50a3-07ae-1e7d102b938b", "H200", 143771, 32362, 100,
          "is in use by processes that cannot be seen (31.6GB, above max_unseen_mem_mib)")}, 0),
    ("h100_idle_noheader", "the first line is a GPU here, units in its cells",
     {0: ("GPU-09208a65-7bdf-0f66-ed88-e18d5387f613", "H100 80GB HBM3", 81559, 0, 0, None)}, 0),
    ("h100_two_shares", "two programs that compute nothing now",
     {0: ("GPU-5d0e1c42-9a37-4f6b-8b21-73c0a4e6f915", "H100 80GB HBM3", 81559, 41051, 0,
          "is in use by processes that cannot be seen (40.1GB, above max_unseen_mem_mib)")}, 0),
    ("l40s_idle_reads_100pct", "idle: 100 % is the query itself, no memory and no process decide",
     {0: ("GPU-4b4d8474-025a-2b83-ea27-8e6ba7a11490", "L40S", 46068, 0, 100, None)}, 0),
    ("rtx2080s_desktop_idle", "free for a job, although the desktop has 214 MiB",
     {0: ("GPU-4105cca7-7596-93fd-0f3b-3742c42b7170", "RTX 2080 SUPER", 8192, 214, 0, None)}, 0),
    ("h100_mig_idle", "its slices are not among the rows",
     {0: ("GPU-ec3fbf4d-44e9-7e26-33bc-1eaa02cdf2af", "H100 80GB HBM3", 81559, 59, None, MIG)}, 0),
    ("compute_modes", "one is unusable, although it looks idle", {
        index: (U(index), "A100-SXM4-80GB", 81920, 4, 0, "is unusable (compute mode Prohibited; sudo nvidia-smi -i 2 -c DEFAULT)"
                if index == 2 else None) for index in range(4)}, 0),
    ("b200_x8", "eight, all idle", {index: (uuid, "B200", 183359, 0, 0, None) for index, uuid in enumerate(
        re.findall("GPU-[0-9a-f-]{36}", sample("b200_x8")))}, 0),
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
]
KNOWN = {U(0): 0, U(1): 1, U(2): 2}


@pytest.mark.parametrize("case, reason, expected, message_count", GPUS, ids=[case[0] for case in GPUS])
def test_parse_gpus(case, reason, expected, message_count):
    gpus, messages = nexus.parse_gpus(rows(case), fields_of(case), KNOWN)
    reasons = [nexus.find_gpu_reason(gpu, config().gpu) for gpu in gpus]
    found = {gpu.index: (gpu.uuid, gpu.name, gpu.memory_total_mib, gpu.memory_used_mib, gpu.utilization, why and why.detail)
             for gpu, why in zip(gpus, reasons)}
    assert found == expected, reason
    assert [gpu.index for gpu in gpus] == sorted(found)
    assert len(messages) == message_count, messages


def test_an_unknown_compute_mode_counts_as_default():
    gpus, _ = nexus.parse_gpus(rows("compute_modes"), nexus.GPU_FIELDS, KNOWN)
    assert [(gpu.compute_mode, nexus.may_share(gpu)) for gpu in gpus] == [
        (None, True), ("Exclusive_Process", False), ("Prohibited", True), (None, True)]
    for cell in ("Exclusive_Thread", "[Not Supported]", "[Unknown Error]", "Shared", ""):
        gpus, _ = nexus.parse_gpus(rows("compute_modes").replace("Prohibited", cell), nexus.GPU_FIELDS, KNOWN)
        assert gpus[2].fault is None and nexus.may_share(gpus[2]) == (cell != "Exclusive_Thread")


NO_GPU = {  # what tells of no GPU, and how many lines of it are messages: no index was asked for, so none is made up; or an error
    "gtx1080ti_1060_mixed": 2, "rtx2080_440_bare_na": 1, "old_driver_not_supported": 1, "mig_in_container_no_permission": 1,
    "no_driver": 1, "driver_library_mismatch": 2, "nvml_unknown_error": 1, "no_devices": 1, "one_lost_of_three": 1, "bad_field": 1}


@pytest.mark.parametrize("case", NO_GPU)
def test_what_tells_of_no_gpu(case):
    gpus, messages = nexus.parse_gpus(rows(case), fields_of(case), KNOWN)
    assert gpus == [] and len(messages) == NO_GPU[case]


def test_a_lost_gpu_that_was_never_seen_whole_is_a_message():
    gpus, messages = nexus.parse_gpus(rows("fields_lost"), fields_of("fields_lost"), {})
    assert [gpu.index for gpu in gpus] == [0, 2]
    assert len(messages) == 1 and U(1) in messages[0] and "GPU is lost" in messages[0]


def test_a_gpu_that_is_lost_between_two_samples():
    gpus, messages = nexus.parse_gpus(rows("loop_lost_midway"), fields_of("loop_lost_midway"), KNOWN)
    assert [(gpu.index, gpu.memory_used_mib, gpu.fault) for gpu in gpus] == [
        (0, 11, None), (0, 11, None), (0, 11, None), (1, 11, None), (1, None, "GPU is lost"), (1, None, "GPU is lost")]
    assert messages == []


VISIBLE = [  # CUDA_VISIBLE_DEVICES, on GPUs 0, 2 and 3 as nvidia-smi counts: the indices it names
    ("0,2", [0, 3]),                            # CUDA counts only the cards that it may open
    (" 1 , 0", [2, 0]), (f"{U(3)},GPU-00000002", [3, 2]), ("0,3,2", [0]), ("0,-1,2", [0]), ("NoDevFiles", []), ("", []),
    ("GPU-0", []),                              # which of them?
]


@pytest.mark.parametrize("text, indices", VISIBLE, ids=[case[0] for case in VISIBLE])
def test_parse_visible_devices(text, indices):
    gpus = [nexus.Gpu(index, U(index), "RTX 3090") for index in (0, 2, 3)]
    assert [gpu.index for gpu in nexus.parse_visible_devices(text, gpus)] == indices


@pytest.mark.parametrize("text, places", [
    ("0", ["0.0", "0.1"]), ("1,0", ["2", "0.0", "0.1"]), ("MIG-b", ["0.1"]), ("MIG-", []), ("2", [])])
def test_visible_slices(text, places):
    """A card's number means all its slices; a UUID must name one."""
    gpus = [*(nexus.Gpu(0, uuid, "A100", slice=number) for number, uuid in enumerate(("MIG-a", "MIG-b"))), nexus.Gpu(2, U(2), "A10")]
    assert [gpu.place for gpu in nexus.parse_visible_devices(text, gpus)] == places


CELLS = [  # cell, in which field, is it a fault of the GPU
    *(("[Unknown Error]", field, field in ("index", "uuid", "memory.total", "memory.used")) for field in nexus.GPU_FIELDS),
    *((cell, field, True) for cell in ("[GPU is lost]", "[GPU requires reset]") for field in nexus.GPU_FIELDS),
    ("[N/A]", "memory.used", False),
]


@pytest.mark.parametrize("cell, field, is_fault", CELLS)
def test_a_broken_sensor_is_no_broken_gpu(cell, field, is_fault):
    healthy = dict(zip(nexus.GPU_FIELDS, ("0", "GPU-1", "A10", "24576", "5", "0", "30", "20.5", "150", "[N/A]", "Default")))
    gpus, _ = nexus.parse_gpus(", ".join({**healthy, field: cell}.values()), nexus.GPU_FIELDS, {"GPU-1": 0})
    assert [gpu.fault for gpu in gpus] == [cell.strip("[]") if is_fault else None]


LISTS = [  # case, what is concluded, indices
    ("h100_mig_list", "one card; its slices are told below it", ["0"]),
    ("a100_mig_list", "one card", ["0"]), ("one_lost_list", "the others, with their own indices", ["1", "2", "3"]),
    ("mixed_list", "two kinds", ["0", "1", "2", "3"]),
]


@pytest.mark.parametrize("case, reason, indices", LISTS, ids=[case[0] for case in LISTS])
def test_which_gpus_a_list_names(case, reason, indices):
    assert re.findall(nexus.GPU_LISTED, sample(case)) == indices, reason


A100 = "GPU-513536b6-7d19-9063-b049-1e69664bb298"
LISTING, REPORT = sample("a100_mig_list"), sample("a100_mig_report")
FOUR = re.findall(r"MIG-[\w-]+", LISTING)
OLD = [f"MIG-{A100}/{instance}/0" for instance in (3, 4, 5, 6)]
ONE = f"{LISTING.splitlines()[0]}\n{LISTING.splitlines()[1]}\n"
WITH_UUIDS = re.sub(r"<index>(\d)</index>", lambda found: f"{found[0]}<uuid>{FOUR[int(found[1])]}</uuid>", REPORT)
UNTOLD = {"0.0": (FOUR[0], None, None, [], "nvidia-smi -q -x does not tell of it")}
UNREAD = "nvidia-smi -q -x does not tell its MIG slices"
SLICES = [  # reason, what -L prints, what -q -x prints, {place: (UUID, total, used, pids, fault)} of an A100 in MIG mode
    ("four, one busy", LISTING, REPORT, {f"0.{number}": (uuid, 19968, 14220 if number == 1 else 12, [34965] * (number == 1), None)
                                         for number, uuid in enumerate(FOUR)}),
    ("drivers 450 to 465", f"GPU 0: A100 (UUID: {A100})\n" + "".join(
        f"  MIG 1g.20gb Device {number}: (UUID: {uuid})\n" for number, uuid in enumerate(OLD)), REPORT,
     {f"0.{number}": (uuid, 19968, 14220 if number == 1 else 12, [34965] * (number == 1), None) for number, uuid in enumerate(OLD)}),
    ("its UUID is told", ONE, WITH_UUIDS, {"0.0": (FOUR[0], 19968, 12, [], None)}),
    ("another one by now", ONE, WITH_UUIDS.replace(FOUR[0], FOUR[3]), UNTOLD),
    ("one that may be opened", ONE, REPORT, {"0.0": (FOUR[0], 19968, 12, [], None)}),
    ("memory N/A", ONE, REPORT.replace("19968 MiB", "N/A").replace("12 MiB", "Insufficient Permissions"),
     {"0.0": (FOUR[0], None, None, [], None)}),
    ("a process of no slice may be on each", ONE, REPORT.replace("<gpu_instance_id>4<", "<gpu_instance_id>N/A<"),
     {"0.0": (FOUR[0], 19968, 12, [34965], None)}),
    ("no list of processes", ONE, re.sub("(?s)<processes>.*</processes>", "<processes>N/A</processes>", REPORT),
     {"0.0": (FOUR[0], 19968, 12, [77], None)}),
    ("nobody computes", ONE, re.sub("(?s)<processes>.*</processes>", "<processes />", REPORT), {"0.0": (FOUR[0], 19968, 12, [], None)}),
    ("a name that is no XML", ONE, REPORT.replace(">python<", ">a<b & \n\x07<"), {"0.0": (FOUR[0], 19968, 12, [], None)}),
    ("not in the report", ONE, REPORT.replace("<index>0<", "<index>7<"), UNTOLD),
    ("cut into nothing", LISTING.splitlines()[0], REPORT, {"0": (A100, 81920, 50, [77], None)}),
    ("no report", LISTING, "", {"0": (A100, 81920, None, [], UNREAD)}),
    ("half of a report", LISTING, REPORT[:2000], {"0": (A100, 81920, None, [], UNREAD)}),
    ("another card's", LISTING, REPORT.replace(A100, U(3)), {"0": (A100, 81920, None, [], UNREAD)}),
    ("no list", "Unable to determine the device handle for gpu 0: Unknown Error", REPORT, {"0": (A100, 81920, None, [], UNREAD)}),
]
CUT = nexus.Gpu(0, A100, "A100-SXM4-80GB", 81920.0, 50.0, None, 27.0, 67.03, 500.0, is_mig=True, processes=(nexus.GpuProcess(77, 100.0),))


@pytest.mark.parametrize("reason, listing, report, expected", SLICES, ids=[case[0] for case in SLICES])
def test_a_card_becomes_its_slices(reason, listing, report, expected):
    beside = nexus.Gpu(1, U(1), "RTX 3090", utilization=0.0)
    *found, last = nexus.cut_cards([CUT, beside], [], listing, report, "")
    assert {gpu.place: (gpu.uuid, gpu.memory_total_mib, gpu.memory_used_mib, [one.pid for one in gpu.processes], gpu.fault)
            for gpu in found} == expected, reason
    assert last == beside
    for gpu in found:
        assert (gpu.index, gpu.utilization) == (0, None), "it is unknown, and not 0"
        assert gpu.slice is None or (gpu.name, gpu.profile, gpu.power_watts) == ("A100-SXM4-80GB MIG 1g.20gb", "1g.20gb", None)


def test_slices_that_cannot_be_read_are_neither_free_nor_forgotten():
    known = nexus.cut_cards([CUT], [], LISTING, REPORT, "")
    found = nexus.cut_cards([CUT], [*known, nexus.Gpu(1, U(1), "RTX 3090")], "", "", "nvidia-smi -q -x: it hangs")
    assert [(gpu.place, gpu.uuid, gpu.memory_used_mib, gpu.processes, gpu.fault) for gpu in found] == [
        (gpu.place, gpu.uuid, None, (), "nvidia-smi -q -x: it hangs") for gpu in known]
    lost = nexus.replace(CUT, fault="GPU is lost")
    assert nexus.cut_cards([lost], known, LISTING, REPORT, "") == [lost]


@given(st.text() | st.sampled_from([LISTING, OLD[0]]), st.text() | st.integers(0, len(REPORT)).map(lambda end: REPORT[:end]))
def test_no_text_makes_a_card_in_mig_mode_free(listing, report):
    assert all(nexus.find_gpu_reason(gpu, config().gpu) for gpu in nexus.cut_cards([CUT], [], listing, report, "")
               if gpu.slice is None)


APPS = [  # case, what is concluded, {uuid: [(pid, MiB)]}
    ("h200_apps_load", "three on one GPU, a relative name among them",
     {"GPU-e94ae4a7-51f0-cfaf-4434-a8eae583fa5d": [(10291, 2646), (10293, 1575), (10309, 28280)]}),
    ("h100_apps_two_shares", "two on one GPU", {"GPU-5d0e1c42-9a37-4f6b-8b21-73c0a4e6f915": [(619, 20518), (630, 20518)]}),
    ("apps_none", "a heading only: nothing runs", {}),
    ("apps_two", "a pid may be on several GPUs",
     {U(0): [(3000, 1234), (3001, 1234)], U(1): [(3000, 1234), (3001, 1234)]}),
    ("apps_name_not_found", "in use, though its process cannot be seen from here", {U(0): [(3000, 1234)]}),
]


@pytest.mark.parametrize("case, reason, expected", APPS, ids=[case[0] for case in APPS])
def test_parse_compute_apps(case, reason, expected):
    found = nexus.parse_compute_apps(rows(case), fields_of(case))
    assert {uuid: [(one.pid, one.memory_mib) for one in line] for uuid, line in found.items()} == expected, reason
    assert all(one.job_id is None for line in found.values() for one in line), "nvidia-smi does not say whose it is"


def test_every_recorded_case_is_tested():
    tested = [case[0] for table in (GPUS, LISTS, APPS) for case in table] + [*NO_GPU, "loop_lost_midway", "a100_mig_report"]
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


def test_hostile_rows_of_nvidia_smi_are_unusable():
    fields = nexus.GPU_FIELDS
    good = dict(zip(fields, ["0", "GPU-1", "A100", "1000", "0", "0", "30", "50", "300", "Disabled", "Default"]))
    rows = [good, {**good, "index": "99999999999999999"}, {**good, "index": "10000", "uuid": "GPU-9"}]
    gpus, messages = nexus.parse_gpus("\n".join(", ".join(row.values()) for row in rows), fields, {})
    assert [gpu.index for gpu in gpus] == [0] and len(messages) == 2
    odd = {**good, "uuid": "x" * 500, "name": "A\x1b[2J" * 100, "memory.used": "9" * 400, "power.draw": "1e400", "utilization.gpu": "²"}
    (gpu,), _ = nexus.parse_gpus(", ".join(odd.values()), fields, {})
    assert (gpu.uuid, len(gpu.name), gpu.memory_used_mib, gpu.power_watts, gpu.utilization) == ("index-0", 100, None, None, None)
    assert nexus.decode_value(nexus.Gpu, json.loads(nexus.encode_json(gpu)), "a GPU", True) == gpu, "a head takes it"
    assert nexus.drop_doubles([gpu, gpu]) == [gpu]
    apps = "GPU-1, 99999999999, 5\nGPU-1, 77, 5\nGPU-1, -1, 5\n"
    assert [process.pid for process in nexus.parse_compute_apps(apps)["GPU-1"]] == [77]

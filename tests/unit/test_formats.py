"""Section 5: what is read from and written for other programs and the disk."""

import json
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from makers import (
    NOW,
    SAMPLES,
    changes,
    config,
    environments,
    groups,
    job,
    jobs,
    nodes,
    state_facts,
    texts,
)

import nexus

# The journal and state.json


@given(st.integers(0, 2**53), st.lists(changes, max_size=4, unique_by=lambda change: (change.table, change.key)))
def test_a_transaction_survives_the_journal(seq, puts):
    line = nexus.encode_transaction(seq, puts)
    assert line.endswith("\n") and line.count("\n") == 1, "one line each"
    found, tables, is_sealed = nexus.read_transaction(line.encode())
    assert found == seq and is_sealed and sum(map(len, tables.values())) == len(puts)
    for change in puts:
        assert nexus.decode_row(change.table, change.key, tables[change.table][change.key]) == change.value


WRONG_ROWS = [  # reason, table, key, row
    ("no table", "jobz", "abc", {}), ("no fact", "facts", "seq", 5), ("a job that is a list", "jobs", "abc", []),
    ("a job without its fields", "jobs", "abc", {}),
    ("a truth that is a text", "facts", "paused", "yes"),
    ("variables that are a number", "environments", "d", {"key": "d", "variables": 1}),
    ("a variable that is a number", "environments", "d", {"key": "d", "variables": {"A": 1}}),
    ("no variables", "environments", "d", {"key": "d"}),
    ("another environment's", "environments", "d", {"key": "e", "variables": {}}),
    ("half a group", "groups", "g", {"name": "g", "limit": 0.5}), ("another group", "groups", "g", {"name": "h"}),
    ("a row seen for ever", "seen", "d", {"key": "d", "count": float("inf")}),
    ("another row", "seen", "d", {"key": "e", "count": 1}),
    ("a node without its address", "nodes", "n1", {"config": {"name": "n1"}}),
    ("another node", "nodes", "n1", {"config": {"name": "n2", "host": "n1"}}),
]


@pytest.mark.parametrize("reason, table, key, given", WRONG_ROWS, ids=[case[0] for case in WRONG_ROWS])
def test_decode_row_refuses(reason, table, key, given):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_row(table, key, given)


WRONG_JOBS = [  # reason, fields that are not as they should be
    ("an unknown status", {"status": "paused"}), ("an id that is a path", {"id": "../x"}),
    ("an id that is a number", {"id": 5}), ("a queue_key of texts", {"queue_key": ["a"]}), ("no queue_key", {"queue_key": None}),
    ("a queue_key of two numbers", {"queue_key": [0, 1]}), ("a number that is a text", {"retries": "1"}),
    ("half an attempt", {"attempts": [[1, 2]]}), ("another job's id", {"id": "abd"}), ("a tuple of another length", {"log_base": [0]}),
    ("a truth for a number", {"gpus": True}), ("an attempt of texts", {"attempts": [["1", 2, 3, 4, 5, "exit", []]]}),
    ("nothing for a text", {"command": None}), ("a time for ever", {"created_at": float("inf")}), ("no time", {"created_at": float("nan")}),
    ("a list for one of its members", {"gpu_ids": 3}),
]


@pytest.mark.parametrize("reason, fields", WRONG_JOBS, ids=[case[0] for case in WRONG_JOBS])
def test_decode_job_refuses(reason, fields):
    with pytest.raises((KeyError, TypeError, ValueError)):
        nexus.decode_row("jobs", "abc", {**nexus.encode_value(job()), **fields})


SAME = [  # reason, two texts of one object
    ("laid out", '{"a":[1,{"b":"c"}]}', '{ "a" : [\n1, {"b": "c"} ] }'), ("in another order", '{"a":1,"b":2}', '{"b":2,"a":1}'),
    ("a number without a fraction", '{"a":[7200.0,{"b":-0.0}],"c":1e22}', '{"a":[7200,{"b":0}],"c":10000000000000000000000}'),
    ("a number with an exponent", '{"a":1.5e3}', '{"a":1500}'),
    ("text without escapes", '{"a":"gr\\u00f6\\u00dfe\\ud83d\\ude80"}', '{"a":"größe🚀"}'),
]
DIFFERENT = [  # reason, two texts of two objects
    ("a text that looks like a number", '{"a":"1.0,"}', '{"a":"1,"}'), ("a number as a text", '{"a":1}', '{"a":"1"}'),
    ("a name", '{"a":1}', '{"b":1}'), ("nothing", '{"a":null}', '{}'), ("a fraction", '{"a":1.25}', '{"a":1.5}'),
    ("a truth", '{"a":true}', '{"a":1}'),
    ("the order of a list", '{"a":[1,2]}', '{"a":[2,1]}'), ("a byte that is no UTF-8", '{"a":"\\udce9"}', '{"a":"\\u00e9"}'),
]


@pytest.mark.parametrize("reason, one, other, is_same", [(*case, True) for case in SAME] + [(*case, False) for case in DIFFERENT],
                         ids=[case[0] for case in SAME + DIFFERENT])
def test_a_checksum_is_of_the_values(reason, one, other, is_same):
    sealed = json.loads(nexus.seal(json.loads(one)))
    assert list(sealed)[-1] == "crc" and nexus.check_seal(sealed)
    changed = {**json.loads(other), "crc": sealed["crc"]}
    if is_same:
        assert nexus.check_seal(changed)
    else:
        with pytest.raises(ValueError, match="its checksum is wrong"):
            nexus.check_seal(changed)


def test_a_job_says_its_status_in_any_case():
    """One whose status is lost must not be taken for a pending one."""
    assert nexus.encode_value(job())["status"] == "pending"


def of_table(made, key):
    return st.lists(made, max_size=3, unique_by=key).map(lambda found: {key(one): one for one in found})


heads = st.fixed_dictionaries({"version": st.just(3), "seq": st.integers(0, 2**53), "host": texts, **state_facts})
tables = st.fixed_dictionaries({
    "environments": st.dictionaries(texts, environments, max_size=3),
    "jobs": of_table(jobs, lambda one: one.id), "groups": of_table(groups, lambda one: one.name),
    "nodes": of_table(nodes, lambda one: one.config.name), "seen": st.dictionaries(texts, st.integers(1, 9), max_size=3),
    "usage": st.just({})})


def decode(text):
    """The head, the facts among it, and the tables."""
    file = nexus.read_state(text)
    assert file.is_sealed and not file.faults
    rows = {table: {key: (nexus.decode_row if table == "facts" else nexus.decode_sealed_row)(table, key, given)
                    for key, given in found.items()} for table, found in file.tables.items()}
    return {"version": file.version, "seq": file.seq, **rows.pop("facts")}, rows


def encode(head, tables):
    made = nexus.State()
    for name, fact in {**head, **tables}.items():
        setattr(made, name, fact)
    return "".join(nexus.encode_state(made))


@given(heads, tables)
def test_a_state_survives_state_json(head, tables):
    text = encode(head, tables)
    found, rows = decode(text)
    assert ({name: found[name] for name in head}, rows) == (head, tables)
    assert json.loads(text)["seq"] == head["seq"], "it is JSON, for others to read"
    assert text.count("\n") > len(tables["jobs"]), "a job a line, for people to read"


# What is looked for in logs: only complete lines are given to a search

TEN = b"".join(b"%d\n" % number for number in range(10))
SEARCHES = [  # reason, text, context, pieces as (stream, content), what is shown
    ("a line", "b", 0, [(0, b"abc\nd\n")], "abc\n"),
    ("no line", "e", 0, [(0, b"abc\nd\n")], ""),
    ("any case", "nan", 0, [(0, b"Loss NaN\nnan\n")], "Loss NaN\nnan\n"),
    ("this case, as there is a capital", "NaN", 0, [(0, b"Loss NaN\nnan\n")], "Loss NaN\n"),
    ("any case of other letters", "\u00fcber", 0, ((0, text.encode()) for text in ["\u00dcBER\n", "\u00fcber\n", "uber\n"]),
     "\u00dcBER\n\u00fcber\n"),
    ("as it stands", "a.c(", 0, [(0, b"abc(\na.c(\n")], "a.c(\n"),
    ("bytes that are no text", "x", 0, [(0, b"\xff x\n\xff\n")], "\udcff x\n"),
    ("both streams", "x", 0, [(0, b"x 1\n"), (1, b"x 2\n")], "x 1\nx 2\n"),
    ("a last line without an end", "x", 0, [(0, b"a\nx\r")], "x\n"),
    ("lines around it", "5", 1, [(0, TEN)], "4\n5\n6\n"),
    ("more than there are", "5", 99, [(0, TEN)], TEN.decode()),
    ("lines around two, which meet", "5", 1, [(0, TEN + TEN[8:])], "4\n5\n6\n--\n4\n5\n6\n"),
    ("which touch", "5", 2, [(0, b"5\n1\n2\n3\n4\n5\n")], "5\n1\n2\n3\n4\n5\n"),
    ("which do not", "5", 1, [(0, b"5\n1\n2\n3\n4\n5\n")], "5\n1\n--\n4\n5\n"),
    ("lines around it in other pieces", "5", 3, [(0, b"%d\n" % number) for number in range(10)], "2\n3\n4\n5\n6\n7\n8\n"),
    ("and on the other stream", "5", 1, [(number % 2, b"%d\n" % number) for number in range(10)], "4\n5\n6\n"),
    ("what follows ends in the next piece but one", "a", 2, [(0, b"a\n"), (0, b"1\n"), (0, b"2\n9\n3\n4\n"), (0, b"a\n")],
     "a\n1\n2\n--\n3\n4\na\n"),
    ("nothing is left out between pieces", "a", 1, [(0, b"a\n1\n"), (0, b"2\na\n")], "a\n1\n2\na\n"),
    ("what was left out lies in a piece without any", "a", 1, [(0, b"a\n1\n"), (0, b"2\n3\n"), (0, b"4\na\n")], "a\n1\n--\n4\na\n"),
    ("a line in two pieces", "needle", 0, [(0, b"x" * 70000 + b"nee"), (0, b"dle\nneedl\n")], "dle\n"),
    ("the next attempt begins no line of the last", "needle", 0, [(0, b"nee"), (2, b"dle\n")], ""),
    ("a letter is never in two pieces", "n", 0, [(0, b"n"), (0, b"a\n")], "n\n"),
]


@pytest.mark.parametrize("reason, text, context, pieces, shown", SEARCHES, ids=[row[0] for row in SEARCHES])
def test_a_search_in_logs(reason, text, context, pieces, shown):
    def make_text(entry, attempts):
        assert entry.content.endswith(b"\n") and attempts == ()
        ends.append(entry)
        return b"--\n" * entry.is_after_gap + entry.content

    search, at, ends, found = nexus.LogSearch(text, context, make_text), [0, 0], [], b""
    lines = b""
    for number, content in pieces:
        stream = number % 2
        entry = nexus.LogEntry(1 + number // 2, stream, at[stream], at[stream] + len(content), None, content, line=1 + lines.count(b"\n"))
        found += search(entry, ())
        at[stream] += len(content)
        lines += content
    for entry in ends:
        assert entry.content.split(b"\n")[0] in lines.split(b"\n")[entry.line - 1], "its number is right"
    assert found.decode("utf-8", "surrogateescape") == shown
    for stream in (0, 1):
        own = [entry.end for entry in ends if entry.stream == stream]
        assert own == sorted(own) and all(end <= at[stream] for end in own), "from there on nothing is lost or repeated"


# nvidia-smi.  samples/nvidia_smi/index.md says of each recorded answer what a correct parser concludes.

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
          "is in use by processes that cannot be seen (31.6GB)")}, 0),
    ("h100_idle_noheader", "the first line is a GPU here, units in its cells",
     {0: ("GPU-09208a65-7bdf-0f66-ed88-e18d5387f613", "H100 80GB HBM3", 81559, 0, 0, None)}, 0),
    ("h100_two_shares", "two programs that compute nothing now",
     {0: ("GPU-5d0e1c42-9a37-4f6b-8b21-73c0a4e6f915", "H100 80GB HBM3", 81559, 41051, 0,
          "is in use by processes that cannot be seen (40.1GB)")}, 0),
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


# /proc, screen, the runner's files

PROC_STATS = [  # reason, text, process
    ("a name that looks like the rest",
     "8857 (a) R 1 (b c) S 8816 8816 7030 0 -1 4194304 147 0 0 0 0 0 0 0 20 0 1 0 267402 2990080 426 "
     "18446744073709551615 94629136044032 94629136061961 140721545151808 0 0 0 0 6 0 1 0 0 17 1 0 0 0 0 0 "
     "94629136076048 94629136077312 94629341863936 140721545157305 140721545157324 140721545157325 140721545158631 0\n",
     nexus.Process(8857, 267402, 8816, 7030, "S", 140721545157325, name="a) R 1 (b c")),
    ("ended, not yet waited for, and nobody else's business",
     "9 (x) Z 1 9 9 0 -1 4227084 103 0 0 0 0 0 0 0 20 0 1 0 5 0 0 "
     "18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
     nexus.Process(9, 5, 1, 9, "Z", 0, name="x")),
    ("a thread of the kernel's",
     "71 (kworker/1:2-events) I 2 0 0 0 -1 69238880 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0 "
     "18446744073709551615 0 0 0 0 0 0 0 2147483647 0 1 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
     nexus.Process(71, 100, 2, 0, "I", 0, is_kernel=True, name="kworker/1:2-events")),
]


SCREENS = [  # reason, text, sessions
    ("none", (SAMPLES / "screen" / "4.9.0_none.stdout").read_text(), {}),
    ("one attached; a name with dots and blanks", (SAMPLES / "screen" / "4.9.0_three.stdout").read_text(), {
        "8822.nexus_job_abc": "Attached", "8825.nexus": "Detached", "8828.with.dots and blanks": "Detached"}),
    ("one was killed", (SAMPLES / "screen" / "4.9.0_dead.stdout").read_text(), {
        "8822.nexus_job_abc": "Detached", "8825.nexus": "Detached", "8835.nexus_job_dead": "Dead ???",
        "8828.with.dots and blanks": "Detached"}),
    ("no date, as before 4.2", "There is a screen on:\n\t123.nexus\t(Detached)\n1 Socket in /run/screen/S-ann.\n",
     {"123.nexus": "Detached"}),
    ("a session without a name of ours", "\tnexus\t(Detached)\n\t12.\t(Detached)\n", {}),
]


SAYINGS = [  # reason, line, saying
    ("a job began", "start abc 1 4242 267381 267384\n", nexus.RunnerEvent("start", "abc", 1, ("4242", "267381", "267384"))),
    ("and ended", "end abc 2 137 6050", nexus.RunnerEvent("end", "abc", 2, ("137", "6050"))),
    ("on a full disk", "end abc 2 137 6050 1", nexus.RunnerEvent("end", "abc", 2, ("137", "6050", "1"))),
    ("its directory is gone", "fail abc 3 cwd", nexus.RunnerEvent("fail", "abc", 3, ("cwd",))),
    ("its GPU was taken by another user's", "bounce abc 1 bob", nexus.RunnerEvent("bounce", "abc", 1, ("bob",))),
    ("another verb", "begin abc 1 2 3", None),
    ("no id", "end 123 1 0 5", None), ("no attempt", "end abc x 0 5", None), ("half a line", "end abc 1 0", None),
    ("two lines in one", "end abc 1 0 5end abd 1 0 5", None),
    ("a code that is none", "end abc 1 x 5", None), ("a digit that is no number", "end abc ² 0 5", None),
    ("a number without end", f"end abc {'9' * 5000} 0 5", None),
]


COMMAND_FILES = [  # reason, text, [(line, command)]
    ("one a line", "a\nb\n", [(1, "a"), (2, "b")]),
    ("empty lines and comments", "# first\n\na\n   \n  # b\nc # d\n", [(3, "a"), (6, "c # d")]),
    ("written on Windows", "\ufeffa\r\nb\r\n", [(1, "a"), (2, "b")]), ("joined there", "a \\\r\n  b\r\nc\r\n", [(1, "a   b"), (3, "c")]),
    ("a line is a line to the shell: other separators of Unicode are text", "echo 'a\u2028b\x85c\x0cd'\n",
     [(1, "echo 'a\u2028b\x85c\x0cd'")]),
    ("joined", "a \\\n  --b \\\n> log\nc\n", [(1, "a   --b > log"), (4, "c")]), ("in a word, too", "ab\\\ncd", [(1, "abcd")]),
    ("to an empty line", "a \\\n\nb", [(1, "a"), (3, "b")]), ("nothing follows", "a\\\n", [(1, "a")]), ("nor here", "a \\", [(1, "a")]),
    ("a backslash that is text", "a \\\\\nb", [(1, "a \\\\"), (2, "b")]),
    ("in a comment it joins nothing", "# a \\\nb \\\nd", [(2, "b d")]),
    ("in quotes", 'a "b \\\n # c" "d\\"" \\\ne', [(1, 'a "b  # c" "d\\"" e')]),
    ("blanks behind it", "a \\ \nb", [(1, "a \\"), (2, "b")]),
]


# What a command says of models and GPUs


CUDAS = [  # reason, command, the same on GPUs 2 and 5
    ("it is added where there is none", "python a.py", "python a.py --cuda 2,5"),
    ("replaced", "python a.py --cuda 0 --x", "python a.py --cuda 2,5 --x"),
    ("with an equals sign", "python a.py --cuda=0,1 --x", "python a.py --cuda 2,5 --x"),
    ("a variable", "python a.py --cuda $GPUS --x", "python a.py --cuda 2,5 --x"),
    ("-1, for the CPU", "python a.py --cuda -1 --x", "python a.py --cuda 2,5 --x"),
    ("without a value", "python a.py --cuda --x", "python a.py --cuda 2,5 --x"),
    ("the next command is not its value", "python a.py --cuda; ls", "python a.py --cuda 2,5; ls"),
    ("nor a file it writes to", "python a.py --cuda >log 2>&1", "python a.py --cuda 2,5 >log 2>&1"),
    ("a pipe", "python a.py --cuda 0|tee log", "python a.py --cuda 2,5|tee log"),
    ("nor the next line", "python a.py --cuda\npython b.py", "python a.py --cuda 2,5\npython b.py"),
    ("the quotes around it stay", 'bash -c "python a.py --cuda 0"', 'bash -c "python a.py --cuda 2,5"'),
    ("and those around an empty one", "bash -c 'python a.py --cuda'", "bash -c 'python a.py --cuda 2,5'"),
    ("brackets stay", "(python a.py --cuda 0)", "(python a.py --cuda 2,5)"),
    ("another option", "a --cuda-graphs 1 --no--cuda 3", "a --cuda-graphs 1 --no--cuda 3 --cuda 2,5"),
]


@pytest.mark.parametrize("reason, command, filled", CUDAS, ids=[case[0] for case in CUDAS])
def test_fill_cuda_option(reason, command, filled):
    assert nexus.fill_cuda_option(command, (2, 5)) == filled, reason
    assert bool(re.search(nexus.CUDA_OPTION, command)) is (filled != command + " --cuda 2,5" or command.endswith("--cuda"))
    assert nexus.fill_cuda_option(filled, (2, 5)) == filled, "a second time changes nothing"


# The jobs file

Row = nexus.JobsRow
JOBS_FILES = [  # reason, text, rows
    ("empty lines and comments", "\n \n # x\n0,a.py\n", [Row(4, 0, "a.py", None, "", None)]),
    ("written on Windows", "\ufeff0,a.py,,,\r\n1,b.py,,,\r\n", [Row(1, 0, "a.py", None, "", None), Row(2, 1, "b.py", None, "", None)]),
    ("its last line is still being written", "0,a.py,env,--x,\n0,b.py,en", [Row(1, 0, "a.py", "env", "--x", None)]),
    ("a line without its last fields", "0,a.py\n1,b.py,env\n", [Row(1, 0, "a.py", None, "", None), Row(2, 1, "b.py", "env", "", None)]),
    ("blanks around the fields", " 0 , a.py , env , --x  1 , 0 \n", [Row(1, 0, "a.py", "env", "--x  1", (0,))]),
    ("ranges and commas", "0,a.py,,,0-2,5\n", [Row(1, 0, "a.py", None, "", (0, 1, 2, 5))]),
    ("arguments that hold commas", '0,a.py,,"--sizes 1,2,3",0\n', [Row(1, 0, "a.py", None, "--sizes 1,2,3", (0,))]),
    ("and quotes", '0,a.py,,"--name ""a b"", --y",\n', [Row(1, 0, "a.py", None, '--name "a b", --y', None)]),
    ("priorities by name, and below zero", "high,a.py\n-1,b.py\n", [Row(1, 0, "a.py", None, "", None), Row(2, -1, "b.py", None, "", None)]),
]


BAD_ROWS = [  # reason, line, what is said of it
    ("one word", "hello", "priority,script,conda_env,arguments,allowed_gpus"), ("no script", "0,,env,--x,", "priority,script"),
    ("a heading without #", "priority,script,conda_env,arguments,allowed_gpus", "priority must be"),
    ("a priority that is none", "urgent,a.py,,,", '"urgent"'), ("a GPU that is none", "0,a.py,,,x", "'x' is not a list of GPU indices"),
    ("commas in the arguments, without quotes", "0,a.py,,--sizes 1,2,x,", "in double quotes"),
    ("quotes that do not end", '0,a.py,,"--x,0', "quotes do not match"),
    ("text behind the quotes", '0,a.py,,"--x" --y,0', "quotes do not match"),
    ("an option for conda", "0,a.py,--help,,", "conda must be"), ("control characters", "0,a.py,,\x1b[2J,", "characters that no command"),
    ("NUL", "0,a.py,,a\0b,", ""), ("a line end of old", "0,a.py,,--x\r--y,", ""), ("as long as no line is", f"0,a.py,,{'x' * 200000},", ""),
]


@pytest.mark.parametrize("reason, line, part", BAD_ROWS, ids=[case[0] for case in BAD_ROWS])
def test_a_bad_row_is_told_and_the_others_load(reason, line, part):
    rows, faults = nexus.parse_jobs_file(f"0,first.py\n{line}\n1,last.py\n")
    assert [(row.line, row.script) for row in rows] == [(1, "first.py"), (3, "last.py")], reason
    assert len(faults) == 1 and faults[0].startswith("line 2, '") and part in faults[0]
    assert nexus.format_line(line, 100)[:40] in faults[0] and len(faults[0]) < 400 and not re.search(nexus.CONTROL, faults[0])


CONTENTS = [  # reason, two lines, whether they are the same job
    ("priority and GPUs do not count", "0,a.py,env,--x,0-3\n", "2,a.py,env,--x,5\n", True),
    ("nor do quotes", "0,a.py,env,--x,\n", '0,a.py,env,"--x",\n', True), ("the script does", "0,a.py\n", "0,b.py\n", False),
    ("the environment does", "0,a.py,env\n", "0,a.py\n", False), ("the arguments do", "0,a.py,,--x\n", "0,a.py,,--y\n", False),
    ("fields do not run into each other", "0,a.py,b,c\n", "0,a.py,,bc\n", False),
]


@pytest.mark.parametrize("reason, one, other, expected", CONTENTS, ids=[case[0] for case in CONTENTS])
def test_what_tells_rows_apart(reason, one, other, expected):
    (first,), (second,) = nexus.parse_jobs_file(one)[0], nexus.parse_jobs_file(other)[0]
    assert (first.content == second.content) is expected, reason


row_cells = st.sampled_from(["0", "high", "x", "a.py", "", "env", '"', '"a,b"', "0-3", "#", "\ufeff", "\r", "\0", "²", "-x", " "]) | texts
jobs_texts = st.lists(st.lists(row_cells, max_size=7).map(",".join), max_size=5).map("\n".join)


@given(jobs_texts, st.data())
def test_every_line_of_a_jobs_file_is_a_row_or_a_fault_or_nothing(text, data):
    rows, faults = nexus.parse_jobs_file(text)
    lines = text.lstrip("\ufeff").split("\n")[:-1]
    told = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(rows) + len(faults) == len(told) and all("\n" not in fault for fault in faults)
    cut = text[: data.draw(st.integers(0, len(text)))]
    assert nexus.parse_jobs_file(cut)[0] == [row for row in rows if row.line <= cut.lstrip("\ufeff").count("\n")], (
        "what is half written changes nothing")


# Sweeps

SWEEP_FILES = {"vals.txt": ["1e-3", "", "  a, b  ", "[1,2]"], "empty": []}
SWEEPS = [  # reason, text, name, values
    ("values", "lr=1e-3,1e-4", "lr", ("1e-3", "1e-4")),
    ("a range, both ends in", "seed=0..4", "seed", ("0", "1", "2", "3", "4")),
    ("below zero", "x=-1..1", "x", ("-1", "0", "1")),
    ("with a step that meets the end", "s=0..20..5", "s", ("0", "5", "10", "15", "20")),
    ("with a step that does not", "s=0..7..3", "s", ("0", "3", "6")),
    ("backwards", "s=20..0..-10", "s", ("20", "10", "0")), ("of one", "s=3..3", "s", ("3",)),
    ("decimal, and 0.1 stays 0.1", "lr=0.1..0.5..0.1", "lr", ("0.1", "0.2", "0.3", "0.4", "0.5")),
    ("a whole start and a decimal step", "x=0..1..0.5", "x", ("0.0", "0.5", "1.0")),
    ("beside values", "x=a,0..1,b", "x", ("a", "0", "1", "b")),
    ("lists", "layers=[64,64],[128,128]", "layers", ("[64,64]", "[128,128]")),
    ("brackets in brackets", 'x={"a": [1,2]},(3,4)', "x", ('{"a": [1,2]}', "(3,4)")),
    ("quotes", """x='a,b',"c,'d" """.rstrip(), "x", ("'a,b'", "\"c,'d\"")),
    ("a bracket in quotes", "x='[',b", "x", ("'['", "b")),
    ("paths and commits are no ranges", "x=../data/a,a..b,HEAD~3..HEAD,..,v1..v2", "x",
     ("../data/a", "a..b", "HEAD~3..HEAD", "..", "v1..v2")),
    ("a file", "s=0,@vals.txt", "s", ("0", "1e-3", "a, b", "[1,2]")), ("a text with an @", "s=@@vals.txt", "s", ("@vals.txt",)),
    ("an equals sign in a value", "x=a=b", "x", ("a=b",)), ("blanks stay", "x=a b, c", "x", ("a b", " c")),
    ("the most", "x=1..10000", "x", tuple(map(str, range(1, 10001)))),
]


NO_SWEEPS = [  # reason, text, part of the message
    ("nothing", "", "not like"), ("no values", "lr", "not like"), ("none after the sign", "lr=", "not like"),
    ("a hole", "lr=1,,2", "not like"), ("a comma at the end", "lr=1,", "not like"), ("an empty file", "lr=@empty", "not like"),
    ("no name", "=1", "not like"), ("a name that is a number", "0=1", "not like"), ("a name of two words", "l r=1", "not like"),
    ("a name with braces", "{lr}=1", "not like"), ("a name with a minus", "learning-rate=1", "not like"),
    ("a range backwards", "seed=2..0", "never comes to its end"), ("a step backwards", "seed=0..20..-5", "never comes"),
    ("a step of nothing", "s=0..2..0", "never comes"), ("decimals without a step", "s=0.1..0.5", "needs a step"),
    ("exponents", "lr=1e-4..1e-2", "1e-4..1e-2 is no range"), ("no end", "x=1..", "1.. is no range"),
    ("four numbers", "x=1..2..3..4", "no range"),
    ("a bracket that is not closed", "x=[1,2", "nothing closes the [ at character 1"),
    ("one that was not opened", "x=a,1]", "nothing opens the ] at character 4"),
    ("crossed", "x=([1)]", "nothing opens the ) at character 4"),
    ("a quote", "msg=ok,it's", "nothing closes the ' at character 6"),
]


@pytest.mark.parametrize("reason, text, part", NO_SWEEPS, ids=[case[0] for case in NO_SWEEPS])
def test_parse_sweep_refuses(reason, text, part):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_sweep(text, SWEEP_FILES.__getitem__)
    assert caught.value.kind == "usage" and "sweep" in caught.value.message and part in caught.value.message, reason
    assert caught.value.hint, reason


def test_the_combinations_of_sweeps():
    lr, seed = ("lr", ("1e-3", "1e-4")), ("seed", ("0", "1"))
    found = nexus.list_combinations([lr, seed])
    assert found == [{"lr": rate, "seed": number} for rate in lr[1] for number in seed[1]], "the last name changes fastest"
    many = [(name, ("1",) * 10000) for name in "abcd"]
    for sweeps, part in (([lr, lr], "given twice"), ([many[0], seed], "more than 10000"), (many, "more than 10000")):
        with pytest.raises(nexus.NexusError, match=part):
            nexus.list_combinations(sweeps)


FILLED = [  # reason, text, values, filled
    ("each place", "a {seed} > log.{seed}", {"seed": "0"}, "a 0 > log.0"),
    ("variables survive", "a {seed} ${HOME} ${seed}", {"seed": "0"}, "a 0 ${HOME} ${seed}"),
    ("awk's braces survive", "awk '{print $1}' x.{seed}", {"seed": "0"}, "awk '{print $1}' x.0"),
    ("a value is as it is", "a {x}", {"x": "\\1"}, "a \\1"),
    ("a value is not filled again", "{a} {b}", {"a": "{b}", "b": "{a}"}, "{b} {a}"),
]


@pytest.mark.parametrize("reason, text, values, filled", FILLED, ids=[case[0] for case in FILLED])
def test_fill_placeholders(reason, text, values, filled):
    assert nexus.fill_placeholders(text, values) == filled, reason


@pytest.mark.parametrize("text, found", [
    ("{lr} ${HOME} {a,b} {} {0} {print} '{print $1}' {x}{y}", ["lr", "x", "y"]), ("{1a} { a } {a b}", [])])
def test_find_placeholders(text, found):
    assert nexus.find_placeholders(text) == found


@pytest.mark.parametrize("text, plain", [("'a,b'", "a,b"), ('"it\'s"', "it's"), ("[1,'x']", "[1,x]"), ("plain", "plain")])
def test_strip_quotes(text, plain):
    assert nexus.strip_quotes(text) == plain


# What a job wrote at its end

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    train()\n    ^^^^^^^\n{}\n'
OOMS = [  # reason, the end of stderr, the line that says it
    ("PyTorch", "Traceback (most recent call last):\n  File \"a.py\", line 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
     "allocate 20.00 GiB. GPU 0 has a total capacity of 23.69 GiB\n", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
     "20.00 GiB. GPU 0 has a total capacity of 23.69 GiB"),
    ("the runtime", "RuntimeError: CUDA error: out of memory\n", "RuntimeError: CUDA error: out of memory"),
    ("cuBLAS", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("TensorFlow", "x\nOOM when allocating tensor with shape[1,2]\ny", "OOM when allocating tensor with shape[1,2]"),
    *[(words, f"x\n{words}\ny", words) for words in (
        "RuntimeError: CUDA driver error: out of memory",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 149,250,113,536 bytes).",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.",
        "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: /rmm/cuda_memory_resource.hpp",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 800.00 MiB on device 0: cudaMalloc failed: out of memory",
        "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "ValueError: Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).")],
    ("harmless", "\x1b[31mCUDA out of memory\x1b[0m", "[31mCUDA out of memory [0m"),
    ("it was only logged", "WARNING:root:batch 0: CUDA out of memory, skipped\nTraceback (most recent call last):\n"
     "  File \"a.py\", line 3, in <module>\n    lr = config['lr']\nKeyError: 'lr'\n", None),
    ("its traceback was logged", TRACEBACK.format("RuntimeError: CUDA out of memory.") + TRACEBACK.format("KeyError: 'lr'"), None),
    ("a line of source", "Traceback (most recent call last):\n  File \"a.py\", line 3, in <module>\n"
     "    raise ValueError(1)  # not a CUDA out of memory\nValueError: 1\n", None),
    ("another exception while it was handled", TRACEBACK.format("RuntimeError: CUDA out of memory.")
     + "\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK.format("KeyError: 1"),
     "RuntimeError: CUDA out of memory."),
    ("one rank of torchrun's", "[rank1]: " + TRACEBACK.format("[rank1]: torch.OutOfMemoryError: CUDA out of memory.")
     + TRACEBACK.format("DistBackendError: aborted") + TRACEBACK.format("torch.distributed.elastic.multiprocessing.errors."
     "ChildFailedError: "), "[rank1]: torch.OutOfMemoryError: CUDA out of memory."),
    ("no rank of torchrun's", "CUDA out of memory, skipped\n" + TRACEBACK.format("KeyError: 1")
     + TRACEBACK.format("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "), None),
    ("the host's memory is another", "MemoryError\nKilled\n", None), ("numpy's, too", "numpy.core._exceptions._ArrayMemoryError: Unable to "
     "allocate 8 GiB", None), ("nothing", "", None),
]


@pytest.mark.parametrize("reason, text, line", OOMS, ids=[case[0] for case in OOMS])
def test_the_line_that_says_out_of_memory(reason, text, line):
    cause = nexus.find_cause(job(), nexus.Result(1), nexus.Evidence(text), None)
    assert cause == ("cuda-oom", line) if line else cause[0] == "exit", reason
    assert nexus.find_cause(job(gpus=0.0), nexus.Result(1), nexus.Evidence(text), None)[0] == "exit", "it has no GPU"


LAST_LINES = [  # reason, text, its last two lines
    ("in their order", "a\n\nValueError: x\n", ["a", "ValueError: x"]),
    ("a progress bar as it was last", "10%\r50%\r100%\nb", ["100%", "b"]), ("one that ends with its return", "10%\r50%\r", ["50%"]),
    ("cut", "x" * 500, ["x" * 179 + "…" + "x" * 120]), ("without colours and titles", "\x1b[31merror\x1b[0m\x1b]0;a title\x07", ["error"]),
    ("a line is what a newline ends", "a\x0cb\u2028c\r\n", ["a b c"]),
]


@given(texts | st.lists(texts, max_size=5).map("\n".join))
def test_a_line_of_a_log_is_one_harmless_line(text):
    evidence = nexus.Evidence(text + "CUDA out of memory" + text)
    for line in (*nexus.find_last_lines(text, 3), nexus.find_cause(job(), nexus.Result(1), evidence, None)[1]):
        assert line == line.strip() and (0 < len(line) <= 300 and not re.search(nexus.CONTROL, line))


OLD_WORDS = ('/h/logs/job_abc/job.sh: line 15:   565 Aborted                 NEXUS_JOB_NONCE="${attempt:+cafe}" KEY=\'a\nhush\' '
             '/usr/bin/env -u _ -- PATH=/hush "$@" bash -c \'x\ny\'')
CAUSES = [  # reason, the end of stderr, the line that may be the cause
    ("the program's own line", "terminate called: NCCL timeout\n", "terminate called: NCCL timeout"),
    ("bash", "NaN\nbash: line 1:   565 Aborted                 (core dumped) python x.py\n", "NaN"),
    ("a script", "NaN\n/a b/run.sh: line 12: 12345 Killed                  python x.py\n", "NaN"),
    ("a word without room", "NaN\nbash: line 1:  9303 Floating point exceptionpython x.py\n", "NaN"),
    ("without a line", "NaN\nbash:  9398 Aborted                 (core dumped) python x.py\n", "NaN"),
    ("another language", "NaN\nbash: Zeile 1:   565 Abgebrochen             (Speicherabzug geschrieben) python x.py\n", "NaN"),
    ("dash", "NaN\nSegmentation fault (core dumped)\n", "NaN"), ("dash, alone", "Killed\n", None),
    ("zsh", "NaN\nzsh:1: segmentation fault (core dumped)  python x.py\n", "NaN"),
    ("fish", "NaN\nfish: Job 1, 'python x.py' terminated by signal SIGABRT (Abort)\n", "NaN"),
    ("timeout", "NaN\ntimeout: the monitored command dumped core\n", "NaN"),
    ("what a shell itself finds", "bash: line 1: nope: command not found\n", "bash: line 1: nope: command not found"),
    ("a number after a colon", "data.csv: line 12: 5 fields expected\n", "data.csv: line 12: 5 fields expected"),
    ("a word of the kind", "Aborted by the watchdog\n", "Aborted by the watchdog"),
    ("tqdm, drawn anew", "NaN\n\r  0%|          | 0/9 [00:00<?, ?it/s]\r 45%|####5     | 4/9 [00:10<00:12,  1.13s/it]\n", "NaN"),
    ("in a file", "NaN\nEpoch 1:  45%|\u2588\u2588\u258c  | 9/20 [00:10<00:12,  1.1s/it, loss=0.3]\n", "NaN"),
    ("without a total", "NaN\ntrain: 9it [00:10,  1.13s/it]\n", "NaN"),
    ("an error behind a bar", "\r 45%|###   | 9/20 [00:10<00:12,  1.1s/it]RuntimeError: NaN\n", "RuntimeError: NaN"),
    ("a bar that was cleared away", "\r 45%|###   | 9/20 [00:10<00:12]\r          \rRuntimeError: NaN\n", "RuntimeError: NaN"),
    ("another bar", "NaN\nstep 1\rstep 2\rstep 3\n", "NaN"), ("Windows", "NaN\r\n", "NaN"),
    ("job.sh, formerly", f"NaN\n{OLD_WORDS}\n", "NaN"), ("the end of that", OLD_WORDS[60:] + "\n", None),
    ("nearly all of it", OLD_WORDS.partition("PATH=")[2], None),
]


@pytest.mark.parametrize("reason, text, line", CAUSES, ids=[case[0] for case in CAUSES])
def test_which_line_is_the_cause(reason, text, line):
    for code, signal, cause in ((134, 6, "signal"), (1, None, "exit")):
        assert nexus.find_cause(job(), nexus.Result(code), nexus.Evidence(text), signal) == (cause, line)
        evidence = nexus.Evidence(text, stdout="loss 0.1\nerror: no such file\n  1%|#  | 1/9 [00:00<00:09]\n")
        printed = "error: no such file" if cause == "exit" else None
        assert nexus.find_cause(job(), nexus.Result(code), evidence, signal) == (cause, line or printed), "of stdout else"
    assert "hush" not in " ".join(nexus.find_last_lines(text, 5))


OOM_FILES = [  # reason, /proc/self/cgroup, the first files that are looked at
    ("version 2", "0::/user.slice/session-2.scope\n", ["/sys/fs/cgroup/user.slice/session-2.scope/memory.events"]),
    ("a container", "0::/\n", ["/sys/fs/cgroup/memory.events"]),
    ("version 1", "4:memory:/a:b\n2:cpu,cpuacct:/\n0::/x\n",
     ["/sys/fs/cgroup/x/memory.events", "/sys/fs/cgroup/memory/a:b/memory.oom_control"]),
    ("none", "", ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]),
]


@pytest.mark.parametrize("reason, text, first", OOM_FILES, ids=[case[0] for case in OOM_FILES])
def test_list_oom_files(reason, text, first):
    assert nexus.list_oom_files(text)[:len(first)] == first


LONG = ("/job.sh: a 1: 1 ", "NEXUS_JOB_NONCE=/job.sh: a 1: 1 ", "1it [1:1: ", "1%|", "\n", "\r", "Killed\n", "1%||\n", "\x1b]",
        ": 1: 1 Killed  ", "[rank0]: \n")


@pytest.mark.parametrize("piece", LONG)
def test_a_long_log_is_read_in_a_time_that_grows_with_it(piece):
    """The service reads those of all jobs that end together, and does nothing else meanwhile."""
    evidence, began_s = nexus.Evidence(piece * (2**18 // len(piece))), time.process_time()
    nexus.find_cause(job(), nexus.Result(1), evidence, None)
    assert time.process_time() - began_s < 1.5


# POST /api/submit: the form, and the flat YAML in it

PLAIN_TYPE = "multipart/form-data; boundary=B"


def make_form(fields, boundary="B", **headers):
    """A multipart body as curl writes it: [(name, file name or None, content)]."""
    made = b""
    for name, file_name, content in fields:
        file = f'; filename="{file_name}"\r\nContent-Type: application/octet-stream' if file_name is not None else ""
        made += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return made + f"--{boundary}--\r\n".encode()


CONFIG_FILE = (b'competition_id: "comp123"\nproject_id: "proj456"\nuser_id: "myuser"\nexpected_time: 10  # seconds\n'
               b'token: "my-secret-token"\n')
BOTH = [("code", "a.py", b"print()\n"), ("config_file", "c.yaml", b"name: a")]
contents = st.binary(max_size=60) | st.lists(st.sampled_from([
    b"\r", b"\n", b"\r\n", b"--", b"-", b"\0", b"\xff", b"\n--B--\n", b"\r--B", b"x", b"\r\n\r\n", b"--B", b" "])).map(b"".join)


@given(contents.filter(bytes.strip), st.sampled_from(["B", "------------------------d74496d66958873e", "a b'()+_,-./:=?"]))
def test_a_script_is_taken_byte_for_byte(code, boundary):
    if f"\r\n--{boundary}".encode() in b"\r\n" + code + b"\r\n":
        return                                                  # a sender chooses another
    body = make_form([("code", "../../etc/passwd", code), ("config_file", "config.yaml", CONFIG_FILE)], boundary)
    assert nexus.parse_submit_form(body, f'multipart/form-data; boundary="{boundary}"') == (code, {
        "competition_id": "comp123", "project_id": "proj456", "user_id": "myuser", "expected_time": 10, "token": "my-secret-token"})


FORMS = [  # reason, body, content type
    ("as curl sends it", make_form(BOTH), PLAIN_TYPE), ("the other way round", make_form(BOTH[::-1]), PLAIN_TYPE),
    ("without quotes", make_form(BOTH).replace(b'name="code"', b"name=code"), PLAIN_TYPE),
    ("blanks behind the boundary", make_form(BOTH).replace(b"--B\r\n", b"--B \t\r\n", 1), PLAIN_TYPE),
    ("any case", make_form(BOTH).replace(b"Content-Disposition: form-data", b"content-disposition:Form-Data"),
     "Multipart/Form-Data; Charset=utf-8; Boundary=B"),
    ("no line end behind it", make_form(BOTH)[:-2], PLAIN_TYPE),
]


@pytest.mark.parametrize("reason, body, content_type", FORMS, ids=[case[0] for case in FORMS])
def test_parse_submit_form(reason, body, content_type):
    assert nexus.parse_submit_form(body, content_type) == (b"print()\n", {"name": "a"})


WRONG_FORMS = [  # reason, body, content type, kind, words
    ("no type", make_form(BOTH), "", "unsupported_media_type", "nothing"),
    ("JSON", make_form(BOTH), "application/json", "unsupported_media_type", "application/json"),
    *((reason, body, content_type, "usage", "must have the fields code and config_file") for reason, body, content_type in (
        ("no boundary", make_form(BOTH), "multipart/form-data"), ("another boundary", make_form(BOTH), "multipart/form-data; boundary=C"),
        ("nothing", b"", PLAIN_TYPE), ("something before it", b"hello\r\n" + make_form(BOTH), PLAIN_TYPE),
        ("cut in a field", make_form(BOTH)[:-9], PLAIN_TYPE), ("no fields", b"--B--\r\n", PLAIN_TYPE),
        ("no code", make_form(BOTH[1:]), PLAIN_TYPE), ("no config_file", make_form(BOTH[:1]), PLAIN_TYPE),
        ("code twice", make_form([*BOTH, BOTH[0]]), PLAIN_TYPE), ("another field", make_form([*BOTH, ("x", "x", b"x")]), PLAIN_TYPE),
        ("no headers", b"--B\r\n\r\nx\r\n--B--\r\n", PLAIN_TYPE))),
    ("empty code", make_form([("code", "c", b" \n"), BOTH[1]]), PLAIN_TYPE, "usage", "code is empty"),
    ("large code", make_form([("code", "c", b"x" * (5 * 2**20 + 1)), BOTH[1]]), PLAIN_TYPE, "too_large", "5242880"),
    ("a large config_file", make_form([BOTH[0], ("config_file", "c", b"#" * 65537)]), PLAIN_TYPE, "too_large", "65536"),
]


@pytest.mark.parametrize("reason, body, content_type, kind, words", WRONG_FORMS, ids=[case[0] for case in WRONG_FORMS])
def test_parse_submit_form_refuses(reason, body, content_type, kind, words):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submit_form(body, content_type)
    assert caught.value.kind == kind and words in caught.value.message, reason


def test_a_large_form_takes_no_time():
    code = b"\r\n-" * (5 * 2**20 // 3)
    began = time.monotonic()
    assert nexus.parse_submit_form(make_form([("code", "a.py", code), BOTH[1]]), PLAIN_TYPE)[0] == code
    with pytest.raises(nexus.NexusError):
        nexus.parse_submit_form(b"--B\r\n" + b"\r\n--Bx" * 2**20, PLAIN_TYPE)
    with pytest.raises(nexus.NexusError):
        nexus.parse_submit_config(f"name: {'a ' * 16384}{'# ' * 16384}\"\n[")
    nexus.parse_submit_config('token: "' + '" ' * 32768 + "x")
    nexus.parse_submit_config(f"token: x{' ' * 65536}x")
    assert time.monotonic() - began < 5


CONFIG_FILES = [  # reason, text, what it says
    ("the seed's", 'user_id: "myuser"\nexpected_time: 10  # seconds\n', {"user_id": "myuser", "expected_time": 10}),
    ("numbers", "expected_time: 1.5\ngpus: 0.5\npriority: -1", {"expected_time": 1.5, "gpus": 0.5, "priority": -1}),
    ("in quotes, too", "expected_time: '10'\ngpus: \"2\"\npriority: 'high'", {"expected_time": 10, "gpus": 2, "priority": 0}),
    ("digits may be a name as they are", "user_id: 007\nname: 1.10\ntoken: 12345678901234567890", {
        "user_id": "007", "name": "1.10", "token": "12345678901234567890"}),
    ("nothing said", "user_id:\nname: # later\nproject_id:  \ntoken: ''", {"token": ""}),
    ("quotes", "name: 'x # no comment'  # one\nuser_id: \"it's\"", {"name": "x # no comment", "user_id": "it's"}),
    ("comments", "name: b#c\nuser_id: e #f\nproject_id: h\t# i", {"name": "b#c", "user_id": "e", "project_id": "h"}),
    ("plain texts", "user_id: -x\nproject_id: http://x/y?z: a\ncompetition_id: größe 🚀", {
        "user_id": "-x", "project_id": "http://x/y?z: a", "competition_id": "größe 🚀"}),
    ("the mark that begins a document", "---\nname: a\n", {"name": "a"}), ("ends of lines", "name: a\r\nuser_id: b\r\n", {
        "name": "a", "user_id": "b"}),
    ("blanks", "name :  a  \nuser_id:\tb\t\n", {"name": "a", "user_id": "b"}),
]


WRONG_CONFIGS = [  # reason, text, words of the message, of the hint
    ("an unknown key", "user_id: x\nexpectedtime: 5", "'expectedtime' is no key", "expected_time"),
    ("one like no other", "zzz: 5", "'zzz'", "competition_id, project_id, user_id, expected_time"),
    ("no time", "expected_time: ten", "expected_time must be seconds, or a time like 90s", ""),
    ("no time at all", "expected_time: 0", "expected_time", ""), ("GPUs by name", "gpus: all", "gpus", ""),
    ("an empty name", 'name: ""', "name", ""), ("no priority", "priority: urgent", "priority", ""), ("a list", "gpus: [1]", "gpus", ""),
    ("a list in lines", "name:\n  - b", "no key", ""), ("a text", "hello", "'hello'", ""), ("JSON", '{"name": 1}', "no key", ""),
    ("over two lines", "name: 'b\nc'", "no key", ""), ("an escape of terminals", "name: \x1b[2J", "name", ""),
]


@pytest.mark.parametrize("reason, text, words, hint", WRONG_CONFIGS, ids=[case[0] for case in WRONG_CONFIGS])
def test_parse_submit_config_refuses(reason, text, words, hint):
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submit_config(text)
    error = caught.value
    assert error.kind == "usage" and words in error.message and error.message.startswith("config_file: "), (reason, error.message)
    assert hint in error.hint, (reason, error.hint)


@given(texts | st.lists(st.sampled_from(["a", "name: ", ": ", "\n", "\r", '"', "'", "\\", "#", " ", "\t", "---", "...", "-", "[", "|", "1",
                                         "e9", "\\u",
                                         "0041", "token: ", "expected_time: ", "\ufeff", "\ud800"])).map("".join))
def test_whatever_comes_is_a_config_file_or_refused(text):
    try:
        assert nexus.parse_submit_config(text).keys() <= nexus.FORM_KEYS.keys()
    except nexus.NexusError as error:
        assert error.kind == "usage" and error.message.startswith("config_file: ")
        assert not re.search(nexus.CONTROL, error.message)


# Tokens

DAY = 86400.0
TOKENS = {token.sha256: token for token in (
    nexus.Token("ann", nexus.hash_text("secret-of-ann"), NOW - DAY), nexus.Token("bob", nexus.hash_text("secret-of-bob"), NOW, NOW + DAY),
    nexus.Token("bob", nexus.hash_text("second-of-bob"), NOW), nexus.Token("cyd", nexus.hash_text("past-of-cyd1"), NOW, NOW))}


def holders(tokens, now=NOW):
    """{token: user} of those that are good."""
    known = {text: tokens.get(nexus.hash_text(text)) for text in (
        "secret-of-ann", "secret-of-bob", "second-of-bob", "past-of-cyd1", "secret-of-an", "", "\udcff")}
    return {text: token.user for text, token in known.items() if token and token.is_good(now)}


def test_tokens_are_written_and_read(tmp_path):
    nexus.change_tokens(nexus.DISK, str(tmp_path / "tokens.json"), lambda none: TOKENS)
    text = (tmp_path / "tokens.json").read_text()
    assert nexus.read_tokens(nexus.DISK, str(tmp_path / "tokens.json")) == TOKENS and "secret" not in text and "second" not in text
    assert holders(TOKENS) == {"secret-of-ann": "ann", "secret-of-bob": "bob", "second-of-bob": "bob"}
    assert holders(TOKENS, NOW + DAY) == {"secret-of-ann": "ann", "second-of-bob": "bob"}


@pytest.mark.parametrize("user, text, kind, words", [
    ("bob", "short", "usage", "12 to 256"), ("bob", "x" * 257, "usage", "12 to 256"),
    ("bob", "with a blank in", "usage", "without blanks"), ("bob", "with-\u00fcmlaut-in", "usage", "ASCII"),
    ("", "long-enough-one", "usage", "user's name"), ("-x", "long-enough-one", "usage", "user's name"),
    ("a b", "long-enough-one", "usage", "user's name"), ("x" * 65, "long-enough-one", "usage", "user's name"),
    ("dan", "secret-of-ann", "conflict", "ann's already")])
def test_tokens_that_cannot_be(user, text, kind, words):
    with pytest.raises(nexus.NexusError, match=words) as raised:
        nexus.add_token(TOKENS, user, text, None, NOW)
    assert raised.value.kind == kind


@pytest.mark.parametrize("given, gone", [
    ("bob", {"secret-of-bob", "second-of-bob"}), ("secret-of-ann", {"secret-of-ann"}), ("cyd", set()),
    (nexus.hash_text("secret-of-bob")[:12], {"secret-of-bob"})])
def test_revoke(given, gone):
    left = nexus.revoke_tokens(TOKENS, given)
    assert holders(TOKENS).keys() - holders(left).keys() == gone and len(left) < len(TOKENS)


@pytest.mark.parametrize("given", ["nobody", "", "secret-of", nexus.hash_text("secret-of-bob")[:8]])
def test_revoke_of_none(given):
    with pytest.raises(nexus.NexusError, match="no token") as raised:
        nexus.revoke_tokens(TOKENS, given)
    assert raised.value.kind == "not_found"


# Slurm, as 22.05.8 says it

def slurm_sample(name):
    return (SAMPLES / "slurm" / f"22.05.8_{name}.stdout").read_text()


def test_parse_slurm_jobs():
    found = {one.id: one for one in nexus.parse_slurm_jobs(slurm_sample("squeue"), "0-0a1b2c3d")}
    assert {one.id: (one.state, one.key) for one in found.values()} == {
        "1": ("COMPLETED", "aaaaaaaaaaaa"), "2": ("FAILED", "bbbbbbbbbbbb"), "3": ("RUNNING", ""), "4": ("RUNNING", ""),
        "5": ("TIMEOUT", "eeeeeeeeeeee"), "6": ("PREEMPTED", "ffffffffffff"), "7": ("COMPLETED", ""),
        "9": ("PENDING", "111111111111"), "10": ("CANCELLED", "222222222222")}, "an array is none of ours"
    assert found["5"] == nexus.SlurmJob("5", "TIMEOUT", "TimeLimit", "n1", 1795282788.0, 1795282817.0, "eeeeeeeeeeee")
    assert found["9"] == nexus.SlurmJob("9", "PENDING", "JobHeldUser", key="111111111111")
    assert not any(one.key for one in nexus.parse_slurm_jobs(slurm_sample("squeue"), "0-other")), "another service's"
    assert nexus.parse_slurm_jobs("5|RUNNING|N/A|N/A||None|nexus_abc|billing: 7", "0-0a1b2c3d")[0].key is None, "somebody has rewritten it"


def test_parse_slurm_partitions():
    found = nexus.parse_slurm_partitions(slurm_sample("partitions"), slurm_sample("nodes"))
    assert found[0] == nexus.SlurmPartition("main", "up", True, "UNLIMITED", 3, 2)
    assert [(one.name, one.is_default, one.time_limit, one.gpus, one.gpus_used) for one in found[1:3]] == [
        ("urgent", False, "UNLIMITED", 2, 2), ("short", False, "00:10:00", 3, 2)]
    assert nexus.parse_slurm_partitions("PartitionName=x State=DOWN\nslurm_load_partitions error", "") == (
        nexus.SlurmPartition("x", "down", False, "?", 0, 0),)


@pytest.mark.parametrize("text, count", [
    ("gpu:a100:2(S:0-1),gpu:1,shard:8", 3), ("gpu:a100:1(IDX:0,2)", 1), ("gpu:(null):1(IDX:0)", 1), ("(null)", 0),
    ("gpu:a100:0(IDX:N/A)", 0)])
def test_count_gres(text, count):
    assert nexus.count_gres(text) == count


@pytest.mark.parametrize("text, slurm_id", [
    ("12\n", "12"), ("12;nx\n", "12"), ("sbatch: warning: a new rule from 2025 on\n12\n", "12"), ("", None),
    ("sbatch: error: Batch job submission failed: Invalid partition name specified\n", None)])
def test_what_sbatch_answers(text, slurm_id):
    match = re.search(nexus.SBATCH_ANSWER, text)
    assert (match and match[1]) == slurm_id


SLURM_FAULTS = [  # what sbatch or squeue said, as one line, what it is the fault of, what is in the hint
    ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified\n",
     "invalid partition specified: nope; Invalid partition name specified", "config", "[slurm] partition, account, qos"),
    ("sbatch: unrecognized option '--nonsense'\nTry \"sbatch --help\" for more information\n",
     "unrecognized option '--nonsense'", "config", "extra_args"),
    ("sbatch: error: Memory specification can not be satisfied\n"
     "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
     "Memory specification can not be satisfied; Requested node configuration is not available", "job", "ask for less"),
    ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
     "limit, user's size and/or time limits)\n", "AssocMaxSubmitJobLimit; Job violates accounting/QOS policy (job submit limit, user's "
     "size and/or time limits)", "limit", "as jobs end"),
    ("sbatch: error: QOSMaxGRESPerUser\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
     "limit, user's size and/or time limits)\n", "QOSMaxGRESPerUser; Job violates accounting/QOS policy (job submit limit, user's "
     "size and/or time limits)", "job", "ask for less"),
    ("sbatch: error: QOSMaxSubmitJobPerUserLimit\n", "QOSMaxSubmitJobPerUserLimit", "", ""),
    ("sbatch: error: Slurm job queue full, sleeping and retrying\n", "Slurm job queue full, sleeping and retrying", "limit", "as jobs end"),
    ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
     "Unable to contact slurm controller (connect failure)", "cluster", "scontrol ping"),
    ("squeue: error: If munged is up, restart with --num-threads=10\nslurm_load_jobs error: Protocol authentication error\n",
     "If munged is up, restart with --num-threads=10; Protocol authentication error", "cluster", "munge -n"),
    ("sbatch: error: something new\n", "something new", "", ""),
]


@pytest.mark.parametrize("said, words, fault, hint", SLURM_FAULTS, ids=[case[1][:40] for case in SLURM_FAULTS])
def test_why_slurm_refuses(said, words, fault, hint):
    assert nexus.clean_slurm_words(said) == words
    assert nexus.read_refusal(words)[0] == fault and hint in nexus.read_refusal(words)[1]


# Those of one shape

PARSERS = [  # function, its cases: (reason, text, what comes of it)
    (nexus.parse_proc_stat, PROC_STATS), (lambda text: dict(re.findall(nexus.SCREEN_SESSION, text)), SCREENS),
    (nexus.parse_runner_event, SAYINGS), (nexus.parse_commands, COMMAND_FILES),
    (nexus.parse_jobs_file, [(reason, text, (rows, [])) for reason, text, rows in JOBS_FILES]),
    (lambda text: nexus.parse_sweep(text, SWEEP_FILES.__getitem__),
     [(reason, text, (name, values)) for reason, text, name, values in SWEEPS]),
    (lambda text: nexus.find_last_lines(text, 2), LAST_LINES), (nexus.parse_submit_config, CONFIG_FILES),
    (lambda case: re.findall(nexus.GPU_LISTED, sample(case)), [(reason, case, indices) for case, reason, indices in LISTS]),
]


@pytest.mark.parametrize("parse, text, found", [
    pytest.param(parse, text, found, id=reason) for parse, cases in PARSERS for reason, text, found in cases])
def test_parsers(parse, text, found):
    assert parse(text) == found


@pytest.mark.parametrize("depth", [10, 900, 985, 990, 995, 2000, 100000])
def test_however_deep_a_text_is_nested_it_is_a_fault_of_the_text(depth):
    text = '{"command": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(nexus.NexusError) as caught:
        nexus.parse_submissions(nexus.parse_json(text, "the body"))
    assert caught.value.kind == "usage"


# What comes from outside: ranges, and the words of other programs


@pytest.mark.parametrize("at, text", [
    (None, None), (0, "1970-01-01T00:00:00Z"), (NOW, "2024-10-24T15:30:15Z"), (253402300799, "9999-12-31T23:59:59Z"),
    (253402300800, None), (-1, None), (1e19, None), (-1e19, None), (float("inf"), None), (float("nan"), None), (2**70, None)])
def test_format_time_never_raises(at, text):
    assert nexus.format_time(at) == text


@pytest.mark.parametrize("seconds, text", [
    (-1e300, "0s"), (float("nan"), "0s"), (float("inf"), "2932896d 23h"), (1e300, "2932896d 23h"), (2**70, "2932896d 23h")])
def test_format_duration_never_raises(seconds, text):
    assert nexus.format_duration(seconds) == text


EDGES = [  # kind, what is taken, what is refused
    ("Epoch", [0, 1.5, 253402300799], [-1, 253402300800, 1e19, -1e19, float("nan"), float("inf"), True, "0", None, [0]]),
    ("Span", [0, 0.5], [-0.1, 1e300, float("inf"), True, "1"]), ("ExitCode", [0, 255], [-1, 256, 2**64 - 1, 1.5, False, "0"]),
    ("Pid", [1, 2**31 - 1], [0, -1, 2**31, 10**18]), ("FileSize", [0, 2**53], [-1, 2**62]), ("Count", [0], [-1, 10**10]),
    ("Index", [0, 9999], [-1, 10000]), ("Amount", [0, -5, 1e12], [1e300, float("nan"), True]),
    ("Session", ["12.nexus_job_abc"], ["12.a b", "x.y", "12.a;id", "12.a\n", "-12.a", "12." + "a" * 99]),
    ("Uuid", ["GPU-1", "MIG-GPU-0/7/0"], ["", "-o", "$(id)", "a b", "a" * 121]),
    ("AttemptKey", ["abc-1-1"], ["abc-1", "../x-1-1", "abc-1-1\n"]),
    ("FilePath", ["/a b/c"], ["a", "-oX", "/a\nb", "/\x1b[2J", "/" + "a" * 4095]), ("BootId", ["b-1"], ["", "$(id)", "a" * 65]),
    ("ScreenVariable", ["SCREENDIR=/run/x"], ["SCREENDIR=x", "LD_PRELOAD=/x", "SCREENDIR=/x\n"]),
    ("Limit", ["timeout", "host-memory", "idle"], ["killed", ""]), ("EndCause", ["launch", "reboot"], ["node-lost", "exit"]),
]


@pytest.mark.parametrize("kind, taken, refused", EDGES, ids=[case[0] for case in EDGES])
def test_each_kind_of_fact_has_a_range(kind, taken, refused):
    for fact in taken:
        assert nexus.decode(kind, fact) == fact
    for fact in refused:
        with pytest.raises(TypeError):
            nexus.decode(kind, fact, "it")


def test_texts_from_outside_are_cut_to_one_harmless_line():
    assert nexus.decode("Words", "a\nb\x1b[2J") == "a b [2J" and nexus.decode("Name", "x" * 101) == "x" * 99 + "…"
    assert len(nexus.decode("Words", "数" * 10**6)) == nexus.MAX_WORDS == len(nexus.decode("Words", "x" * 1000))


def test_limits_that_an_older_agent_kept_hold():
    kept = {"timeout_seconds": 5.0, "timeout_name": "its time limit", "max_memory_gb": 0.5, "kill_grace_seconds": 1,
            "idle_kill_seconds": 60}               # which only the head ends jobs for
    assert nexus.decode("Limits", kept) == nexus.Limits(
        timeout_seconds=5, timeout_name="its time limit", max_memory_gb=0.5, kill_grace_seconds=1)


def test_every_kind_of_an_annotation_can_be_decoded():
    named = {word for cls in vars(nexus).values() if isinstance(cls, type) and issubclass(cls, nexus.Value)
             for kind in cls.__annotations__.values() for word in re.findall(r"\w+", kind)}
    assert nexus.FACT_KINDS.keys() <= named, "no row is for nobody"


NOTES = [  # reason, known, told, notes then
    ("new ones come last", ("a",), ["a", "b"], ("a", "b")), ("none is new", ("a", "b"), ["b"], ("a", "b")),
    ("one twice", (), ["a", "a"], ("a",)), ("too many", (), [str(number) for number in range(30)], tuple(map(str, range(10, 30)))),
    ("too many with those before", tuple("abcdefghijklmnopqrst"), ["c", "x"], (*"bdefghijklmnopqrst", "c", "x")),
]


@pytest.mark.parametrize("reason, known, told, notes", NOTES, ids=[case[0] for case in NOTES])
def test_add_notes(reason, known, told, notes):
    assert nexus.add_notes(known, told) == notes and nexus.add_notes(notes, told) == notes


HOSTILE_EVENTS = ["start abc 1 9999999999 5 5", "start abc 1 1 9999999999999999999 5", "start abc 1 0 5 5", "start abc 9999999999999 5 5 5",
                  "end abc 1 99999999999999 5", "end abc 1 0 9999999999999999999", "end abc 1 ² 5", "start abc 1 -1 5 5"]


@pytest.mark.parametrize("line", HOSTILE_EVENTS)
def test_an_event_that_no_runner_writes_is_none(line):
    assert nexus.parse_runner_event(line) is None


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


@pytest.mark.parametrize("line, shown", [
    ("9" * 500 + "|RUNNING|||||nexus_abc|nexus:0-0:k", []),
    ("7|RUNNING|0001-01-01T00:00:00|9999-12-31T23:59:60|n|r|nexus_abc|nexus:0-0:k", [(None, None)]),
    ("7|RUNNING|99999-01-01|-1|n|r|nexus_abc|nexus:0-0:k", [(None, None)])])
def test_hostile_rows_of_squeue_are_unusable(line, shown):
    assert [(job.started_at, job.ended_at) for job in nexus.parse_slurm_jobs(line, "0-0")] == shown

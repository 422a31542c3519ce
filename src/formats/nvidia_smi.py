"""What nvidia-smi prints.

It prints everything on stdout, errors too.  A row counts only if it has a cell for each field.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence

from ..opening import TYPE_CHECKING
from ..values.gpu import Gpu, GpuProcess
from ..values.job import FACT_KINDS
from ..values.schema import fits_alone
from ..values.text import cut_words
from ..values.value import replace

if TYPE_CHECKING:
    from typing import Any
    from xml.etree import ElementTree

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
              "power.draw", "power.limit", "mig.mode.current", "compute_mode")
BASIC_GPU_FIELDS = GPU_FIELDS[:5]               # known to every driver; one unknown field makes the query fail
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")
GPU_LISTED = r"(?m)^GPU ([0-9]{1,4}): .* \(UUID: [\w.-]+\)\s*$"   # of `nvidia-smi -L`: a GPU's index; MIG slices differ
SLICE_LISTED = (                                # a card's index; below it a slice's profile, number and UUID
    r"(?m)^(?:GPU ([0-9]{1,4}): | +MIG (\S{1,60}) +Device +([0-9]{1,4}): \(UUID: (MIG-[A-Za-z0-9_./-]{1,100})\))")
PROHIBITED, EXCLUSIVE = "Prohibited", ("Exclusive_Process", "Exclusive_Thread")     # compute modes besides Default
FAULT_CELLS = ("[GPU is lost]", "[GPU requires reset]")
NEEDED_FIELDS = ("index", "uuid", "memory.total", "memory.used")       # in others, [Unknown Error] is a sensor's


def parse_csv_rows(text: str, fields: Sequence[str]) -> tuple[list[dict[str, str]], list[str]]:
    """({field: cell} of each row, other lines) of a `--query-…=FIELDS` reply; other lines are messages."""
    lines = [[cell.strip() for cell in line.split(", ")] for line in text.splitlines() if line.strip()]
    return ([dict(zip(fields, cells)) for cells in lines if len(cells) == len(fields)],
            [", ".join(cells) for cells in lines if len(cells) != len(fields)])


def is_number(text: str, kind: str = "Ticks") -> bool:
    """Whether it is a whole number of this kind: not `²`, and not thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) < 20 and fits_alone(FACT_KINDS[kind].schema, int(text))


def parse_reading(cell: str | None) -> float | None:
    """A number with or without a unit; None for [N/A], [Insufficient Permissions], a fault, or what cannot be."""
    match = re.fullmatch(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(?: (?:MiB|%|W|MHz))?", cell or "")
    return float(match[1]) if match else None


def parse_gpus(text: str, fields: Sequence[str], earlier: Mapping[str, int]) -> tuple[list[Gpu], list[str]]:
    """(GPUs, messages) of a --query-gpu reply.

    `earlier`: {uuid: index} of earlier replies.  A lost GPU may show its fault in place of its index.
    """
    rows, messages = parse_csv_rows(text, fields)
    gpus = list[Gpu]()
    for row in rows:
        fault = next((cell[1:-1] for name, cell in row.items()
                      if cell in FAULT_CELLS or (cell == "[Unknown Error]" and name in NEEDED_FIELDS)), None)
        uuid = row.get("uuid", "")
        index = int(row["index"]) if is_number(row.get("index", ""), "Index") else earlier.get(uuid)
        if index is None:
            messages.append(", ".join(row.values()))
            continue
        gpus.append(Gpu(
            index=index, uuid=uuid if re.fullmatch(r"(?a)[A-Za-z0-9][\w.-]{0,119}", uuid) else f"index-{index}",
            name=cut_words(re.sub("^(NVIDIA )?(GeForce )?", "", row.get("name", "")), 100) or "GPU",
            memory_total_mib=parse_reading(row.get("memory.total")),
            memory_used_mib=parse_reading(row.get("memory.used")),
            utilization=parse_reading(row.get("utilization.gpu")),
            temperature=parse_reading(row.get("temperature.gpu")),
            power_watts=parse_reading(row.get("power.draw")),
            power_limit_watts=parse_reading(row.get("power.limit")),
            is_mig=row.get("mig.mode.current") == "Enabled", fault=fault,
            compute_mode=next((mode for mode in (PROHIBITED, *EXCLUSIVE) if mode == row.get("compute_mode")), None)))
    return sorted(gpus, key=lambda gpu: gpu.index), messages


def drop_doubles(gpus: Iterable[Gpu]) -> list[Gpu]:
    """The GPUs with a name and a UUID of their own."""
    kept, taken = list[Gpu](), set[str]()
    for gpu in gpus:
        if taken.isdisjoint((gpu.local_place, gpu.uuid)):
            kept.append(gpu)
        taken |= {gpu.local_place, gpu.uuid}
    return kept


def cut_cards(gpus: Sequence[Gpu], earlier: Iterable[Gpu], listing: str, report: str, error: str) -> list[Gpu]:
    """The GPUs with MIG slices in place of the cards that are cut.  A card in MIG mode without slices stays.

    `listing` is of `nvidia-smi -L`, which has UUIDs; `report` of `nvidia-smi -q -x`, which has memory and processes.
    `error`: why there is no report.  If a card cannot be read, the slices `earlier` of it get a fault.
    """
    import xml.etree.ElementTree as etree
    reports: dict[str | None, ElementTree.Element] = {}
    with contextlib.suppress(etree.ParseError):   # a process's name is as its owner likes
        root = etree.fromstring(re.sub("(?s)<process_name>.*?</process_name>", "", report))
        reports = {card.findtext("uuid"): card for card in root.iter("gpu")}
    slices: dict[int, list[tuple[int, str, str]]] = {}
    index = -1
    for card_index, profile, number, uuid in re.findall(SLICE_LISTED, listing):
        index = int(card_index or index)
        slices.setdefault(index, []).extend([(int(number), profile, uuid)] if uuid else [])
    found: list[Gpu] = []
    for gpu in gpus:
        if gpu.fault or not gpu.is_mig:
            found.append(gpu)
        elif gpu.index in slices and gpu.uuid in reports:
            found += [cut_card(gpu, *row, reports[gpu.uuid]) for row in slices[gpu.index]] or [gpu]
        else:
            before = [former for former in earlier if former.index == gpu.index and former.slice is not None] or [gpu]
            fault = error or "nvidia-smi -q -x does not tell its MIG slices"
            found += [forget_readings(former, fault=fault) for former in before]
    return found


def cut_card(card: Gpu, number: int, profile: str, uuid: str, report: ElementTree.Element) -> Gpu:
    """A MIG slice.  What is measured of the whole card only, like its utilization, is unknown."""
    made = forget_readings(card, uuid=uuid, name=f"{card.name} MIG {profile}", slice=number, profile=profile,
                           memory_total_mib=None, power_limit_watts=None)
    device = next((row for row in report.iter("mig_device") if row.findtext("index") == str(number)), None)
    if device is None or device.findtext("uuid", uuid) != uuid:
        return replace(made, fault="nvidia-smi -q -x does not tell of it")

    return replace(
        made, temperature=card.temperature, memory_total_mib=parse_reading(device.findtext("fb_memory_usage/total")),
        memory_used_mib=parse_reading(device.findtext("fb_memory_usage/used")),
        # Without a list by slice (`N/A`), each process of the card may be on this one
        processes=card.processes if report.findtext("processes", "N/A").strip() else tuple(
            GpuProcess(int(process.findtext("pid", "")), parse_reading(process.findtext("used_memory")))
            for process in report.iter("process_info")
            if is_number(process.findtext("pid", ""), "Pid") and "C" in process.findtext("type", "C") and all(
                process.findtext(name, "N/A") in (device.findtext(name), "N/A")
                for name in ("gpu_instance_id", "compute_instance_id"))))


def parse_visible_devices(text: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names, up to an entry that names none: CUDA reads no further.

    A number counts the cards that nvidia-smi shows, and means all slices of a card.  A UUID may be abbreviated.
    """
    found, cards = list[Gpu](), list(dict.fromkeys(gpu.index for gpu in gpus))
    for word in map(str.strip, text.split(",")):
        numbers = cards[int(word):int(word) + 1] if is_number(word) else []
        named = [gpu for gpu in gpus if gpu.index in numbers or (
            word and not is_number(word) and gpu.uuid.startswith(word))]
        if not named or (len(named) > 1 and not numbers):
            break
        found += named
    return found


def forget_readings(gpu: Gpu, **facts: Any) -> Gpu:
    return replace(
        gpu, memory_used_mib=None, utilization=None, temperature=None, power_watts=None, processes=(), **facts)


def parse_compute_apps(text: str, fields: Sequence[str] = APP_FIELDS) -> dict[str, tuple[GpuProcess, ...]]:
    """{GPU uuid: its compute processes}."""
    rows = [row for row in parse_csv_rows(text, fields)[0] if is_number(row["pid"], "Pid")]
    return {uuid: tuple(GpuProcess(int(row["pid"]), parse_reading(row["used_memory"]))
                        for row in rows if row["gpu_uuid"] == uuid)
            for uuid in {row["gpu_uuid"] for row in rows}}

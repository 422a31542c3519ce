"""Who reads the GPUs: nvidia-smi, or made-up ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..formats.nvidia_smi import (
    APP_FIELDS,
    BASIC_GPU_FIELDS,
    GPU_FIELDS,
    GPU_LISTED,
    cut_cards,
    forget_readings,
    parse_compute_apps,
    parse_gpus,
)
from ..values.errors import NexusError
from ..values.gpu import Gpu
from ..values.value import replace
from .programs import Completed, run

SMI_TIMEOUT_S = 60.0            # without persistence mode the driver loads each card at each run: 30 s for eight


class GpuSource:
    """Tells of the GPUs of this machine, by a vendor's program."""
    program = ""
    slow_hint = ""                                      # why it may take long, and what helps

    def query_gpus(self, earlier: Mapping[str, Gpu]) -> list[Gpu]:
        """The GPUs by index, with their processes.  Those of `earlier` (by uuid) that are not shown get a fault.

        Raises: unavailable, when nothing is known.
        """
        raise NotImplementedError

    @property
    def not_shown(self) -> str:
        """The fault of a GPU that was there before, and of which nothing is told."""
        return f"{self.program} does not show it"


class NvidiaSmi(GpuSource):
    """nvidia-smi.  Source: `nvidia-smi --help-query-gpu`, `--help-query-compute-apps`."""
    program = "nvidia-smi"
    slow_hint = ("nvidia-smi is slow while the driver loads the cards at each run: start nvidia-persistenced, "
                 "or nvidia-smi -pm 1")
    fields: Sequence[str] = GPU_FIELDS

    def query_gpus(self, earlier: Mapping[str, Gpu]) -> list[Gpu]:
        only: tuple[str, ...] = ()
        answer = self.ask_gpus()
        if answer.exit_code == 6:                       # no devices were found
            return self.find_missing((), earlier, ())
        indices = {uuid: gpu.index for uuid, gpu in earlier.items()}
        gpus, messages = parse_gpus(answer.output, self.fields, indices)
        if answer.exit_code not in (0, 14):
            usable = [str(gpu.index) for gpu in gpus if not gpu.fault]
            if not gpus and "device handle" in answer.output:
                # A card that cannot be opened hides the others, unless they are asked for by index; newer drivers show
                # them.
                usable = re.findall(GPU_LISTED, self.ask("-L").output)
                answer = self.ask_gpus("-i", ",".join(usable)) if usable else answer
            if not gpus:
                if answer.exit_code not in (0, 14):
                    raise fail_smi(answer)
                gpus = parse_gpus(answer.output, self.fields, indices)[0]
            only = ("-i", ",".join(usable))
        gpus = sorted([*gpus, *self.find_missing(gpus, earlier, messages)], key=lambda gpu: gpu.index)
        if all(gpu.fault for gpu in gpus):
            return gpus
        apps = self.ask(*only, f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv,noheader,nounits")
        if apps.exit_code not in (0, 3, 14):            # 3: not supported by this device
            raise fail_smi(apps)
        processes = parse_compute_apps(apps.output)
        gpus = [replace(gpu, processes=processes.get(gpu.uuid, ())) for gpu in gpus]
        if not any(gpu.is_mig for gpu in gpus):
            return gpus
        listing, report = self.ask("-L"), self.ask(*only, "-q", "-x")
        error = "" if report.exit_code in (0, 14) else fail_smi(report).message
        return cut_cards(gpus, earlier.values(), listing.output, report.output, error)

    def ask_gpus(self, *only: str) -> Completed:
        answer = self.ask(*only, f"--query-gpu={','.join(self.fields)}", "--format=csv,noheader,nounits")
        if answer.exit_code == 2 and self.fields is GPU_FIELDS:
            self.fields = BASIC_GPU_FIELDS          # an older driver
            return self.ask_gpus(*only)
        return answer

    def ask(self, *arguments: str) -> Completed:
        return run([self.program, *arguments], SMI_TIMEOUT_S, hint=f"try it by hand: nvidia-smi; {self.slow_hint}",
                   install="install the NVIDIA driver; or where nvidia-smi works, nexus restart: its folder is "
                           "remembered then; without a GPU, nexus add --gpus 0, "
                           "or for a trial NEXUS_MOCK_GPUS=2 nexus restart")

    def find_missing(self, gpus: Sequence[Gpu], earlier: Mapping[str, Gpu], messages: Sequence[str]) -> list[Gpu]:
        """The GPUs that a message names or that were there before, but have no row now: unusable, but not forgotten."""
        # A GPU whose index is taken was renumbered.
        text, taken = " ".join(messages), {fact for gpu in gpus for fact in (gpu.uuid, gpu.index)}
        faults = {"GPU is lost": "GPU is lost", "Unknown Error": "Unknown Error",
                  "reset must occur": "GPU requires reset"}
        fault = next((fault for words, fault in faults.items() if words in text), self.not_shown)
        missing = [forget_readings(gpu, fault=fault) for gpu in earlier.values() if not taken & {gpu.uuid, gpu.index}]
        named = set(map(int, re.findall(r"device handle for (?:GPU|gpu) ?(\d{1,4}):(?!\w)", text)))
        new = named - {gpu.index for gpu in [*gpus, *missing]}
        return missing + [Gpu(index, f"index-{index}", "GPU", fault=fault) for index in new]


def fail_smi(answer: Completed) -> NexusError:
    hints = {9: "is the NVIDIA driver loaded?  lsmod | grep nvidia",
             18: "the driver was upgraded under a running kernel: reboot",
             12: "reinstall the NVIDIA driver: libnvidia-ml.so is missing", 4: "check the rights of /dev/nvidia*",
             255: "in a container, restart it: it lost its devices"}
    hint = hints.get(answer.exit_code, "try it by hand: nvidia-smi")
    said = next(filter(None, map(str.strip, answer.output.splitlines())), "no output")
    what = f"nvidia-smi: {said} (exit code {answer.exit_code})"
    if answer.exit_code < 0:
        what = f"nvidia-smi was ended by signal {-answer.exit_code}"
    return NexusError("unavailable", what, hint)


class MockGpus(GpuSource):
    """Made-up idle GPUs, for trials and tests."""
    program = "a made-up program"

    def __init__(self, count: int) -> None:
        self.count = count

    def query_gpus(self, earlier: Mapping[str, Gpu]) -> list[Gpu]:
        return [Gpu(index, f"MOCK-{index}", "Mock GPU", 24576.0, 0.0, 0.0) for index in range(self.count)]

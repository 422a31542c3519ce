"""Files of commands: those of `add --file`, and the jobs file that the service watches."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .. import text_of
from ..opening import TYPE_CHECKING
from ..values.errors import NexusError
from ..values.job import COMMAND, GPU_COUNT
from ..values.schema import fits_alone, parse_field
from ..values.submission import JOB_FIELDS
from ..values.text import CONTROL, format_line, parse_indices, refuse
from ..values.value import Value

if TYPE_CHECKING:
    from ..opening import Schema


def parse_commands(text: str) -> list[tuple[int, str]]:
    """[(line number, command)] of a file with one command a line, without empty lines and those that begin with #.

    A backslash at the end of a line joins the next one to it.
    """
    commands, lines = [], enumerate(text.lstrip("\ufeff").replace("\r\n", "\n").split("\n"), 1)
    for number, line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            while re.search(r"(?<!\\)(\\\\)*\\$", line):          # an odd number of backslashes
                line = line[:-1] + next(lines, (0, ""))[1]
            commands.append((number, line.strip()))
    return commands


LLM_OPTION = r"(?<!\S)--llm(?:=|\s+)['\"]?([^\s'\";|&]+)"
CUDA_OPTION = (                     # with its value, if it has one; the end of the command or of its quotes is none
    r"""(?<!\S)--cuda(?:(?:=|[ \t]+(?!-(?!\d)|[;|&<>)\s]|\d*[<>]))"""
    r"""(?:"[^"]*"|'[^']*'|[^\s;|&<>)"']+)|=?(?=[\s;|&<>)"']|$))""")


def fill_cuda_option(command: str, indices: Iterable[int]) -> str:
    """The command with its `--cuda` set to these GPUs, or with one added."""
    option = "--cuda " + ",".join(map(str, indices))
    filled, count = re.subn(CUDA_OPTION, option, command)
    return filled if count else f"{command} {option}"


TEE_PIPE = r"(?<!\|)\|&?\s*(?:\S*/)?tee\b[^|]*$"       # the last pipe of a command
TEE_ENDING = text_of("tee_ending.sh")


LLM_CONFIG: Schema = {"type": "object", "title": "this file", "additionalProperties": False, "properties": {
    "default_requirement": GPU_COUNT, "models": {"type": "object", "additionalProperties": GPU_COUNT}}}


class JobsRow(Value):
    line: int                           # its number, from 1
    priority: int
    script: str
    conda: str | None
    arguments: str
    gpu_ids: tuple[int | str, ...] | None

    @property
    def content(self) -> str:
        """The row's identity: without priority and GPUs."""
        return "\0".join((self.script, self.conda or "", self.arguments))


def parse_jobs_file(text: str) -> tuple[list[JobsRow], list[str]]:
    """(rows `priority,script,conda_env,arguments,allowed_gpus`, faults of the other lines).

    The last field may hold commas; arguments with commas stand in double quotes.  A last line without a newline is
    left out, as it may be half written.
    """
    rows, faults = [], []
    for number, line in enumerate(map(str.strip, text.lstrip("\ufeff").split("\n")[:-1]), 1):
        try:
            rows += [parse_jobs_row(number, line)] if line and not line.startswith("#") else []
        except NexusError as error:
            faults.append(f"line {number}, '{format_line(line, 100)}': {error.message}")
    return rows, faults


def parse_jobs_row(number: int, line: str) -> JobsRow:
    """Raises: usage."""
    import csv
    try:
        cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        refuse(f"its quotes do not match ({error})")
    if len(cells) < 2 or not cells[1]:
        refuse("it is not like priority,script,conda_env,arguments,allowed_gpus")
    cells += [""] * (5 - len(cells))
    priority = parse_field(JOB_FIELDS["priority"], cells[0], "priority")
    script, conda, arguments, *allowed = cells[1:]
    if not fits_alone(COMMAND, line) or re.sub(CONTROL, "", line.replace("\t", "")) != line.replace("\t", ""):
        refuse("it holds characters that no command can have")
    try:
        gpu_ids = parse_indices(",".join(allowed)) if any(allowed) else None
    except NexusError as error:
        refuse(f"{error.message}; arguments that hold commas stand in double quotes")
    conda_env = parse_field(JOB_FIELDS["conda"], conda, "conda") if conda else None
    return JobsRow(number, priority, script, conda_env, arguments, gpu_ids)

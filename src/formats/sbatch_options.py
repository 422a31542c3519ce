"""sbatch's options, also those after #SBATCH in a script, as options of nexus: a row of SBATCH_OPTIONS for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from shlex import quote

from ..values.errors import NexusError
from ..values.sweep import MAX_SWEEP
from ..values.text import format_line, refuse


def translate_sbatch(words: Sequence[str], ignored: list[str]) -> list[str]:
    """Our options for those of sbatch.  `ignored` receives those that nexus does without.  Raises: usage."""
    made, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        match = re.fullmatch(r"--([\w-]+)(?:=(.*))?|-(\w)(.*)", word)
        if not match:
            refuse(f"{word} is not an option of sbatch")
        name, text = (match[1], match[2]) if match[1] else (SBATCH_LETTERS.get(match[3], match[3]), match[4])
        if not text:
            is_next = name != "hold" and left and not left[0].startswith("-")
            text = left.pop(0) if is_next else ""
        if name not in SBATCH_OPTIONS or SBATCH_NEEDED.get(name, "") not in text:
            ignored.append(f"{'--' if len(name) > 1 else '-'}{name}{SBATCH_INSTEAD.get(name, '')}")
            continue
        pattern, translate = SBATCH_OPTIONS[name]
        given = re.fullmatch(pattern, text)
        if not given:
            refuse(f"--{name}={format_line(text, 60)} cannot be read", hint=SBATCH_TAKES.get(
                name, "use an option of nexus: nexus help add"))
        made += translate(given)
    return made


def explain_sbatch(words: Sequence[str]) -> str:
    """What to type here for an option of sbatch with its value, perhaps the next word.

    Empty if that is not known, or is what was typed: then something else is wrong with it.
    """
    ignored, ours = list[str](), list[str]()
    given = words[:1] if "=" in words[0] or words[0] in ("-H", "--hold") else words[:2]
    try:
        ours = translate_sbatch(given, ignored)
    except NexusError as error:
        return error.hint if error.hint in SBATCH_TAKES.values() else ""
    if ours == ["=".join(given)]:
        return ""
    instead = re.search(r"\((.+)\)", "".join(ignored))
    return " ".join(map(quote, ours)) or (f"leave it out; instead: {instead[1]}" if instead else "")


def translate_limit(given: re.Match[str]) -> list[str]:
    """`30` (minutes), `30:00`, `2:00:00`, `1-12`, `1-12:00:00`; 0 is without limit there, too."""
    days, *clock = (int(part or 0) for part in given.groups())
    hours, minutes, seconds = clock if given[1] or given[4] else (0, *clock[:2])
    return [f"--timeout={days * 86400 + hours * 3600 + minutes * 60 + seconds}s"]


def translate_array(given: re.Match[str]) -> list[str]:
    """`0-3`, `1,5,7`, `0-15:4%2` as a sweep of `task`."""
    values = list[str]()
    for part in given[1].split(","):
        first, last, step = re.findall(r"^(\d+)-?(\d*):?(\d*)$", part)[0]
        values += map(str, range(int(first), int(last or first) + 1, int(step or 1))[:MAX_SWEEP + 1])
    return [f"--sweep=task={','.join(values)}", *([f"--max-concurrent={given[2]}"] if given[2] else [])]


def translate_gpus(given: re.Match[str]) -> list[str]:
    return [f"--gpus={given[2] or 1}", *([f"--gpu-type={given[1]}"] if given[1] else [])]


SBATCH_LETTERS = {"J": "job-name", "G": "gpus", "t": "time", "a": "array", "D": "chdir", "d": "dependency",
                  "b": "begin", "o": "output", "e": "error", "p": "partition", "c": "cpus-per-task", "n": "ntasks",
                  "N": "nodes", "H": "hold"}
SBATCH_INSTEAD = {"output": " (nexus logs ID)", "error": " (nexus logs ID)", "nodelist": " (--node)",
                  "export": " (--env)", "requeue": " (--retries)"}
SBATCH_NEEDED = {"gres": "gpu", "export": "="}      # {option: what it must have to be of use here}
SBATCH_TAKES = {"dependency": "of these, nexus has afterok and afterany: --after ID, --after-any ID"}
ARRAY_PART = r"\d{1,12}(?:-\d{1,12}(?::[1-9]\d{0,8})?)?"
SBATCH_GPUS = r"([A-Za-z_][\w.-]*)?:?(\d+)?(?:\(.*\))?"
SBATCH_OPTIONS: Mapping[str, tuple[str, Callable[[re.Match[str]], list[str]]]] = {      # {name: (what it takes, ours)}
    "job-name": ("(.+)", lambda given: [f"--name={given[1]}"]),
    "chdir": ("(.+)", lambda given: [f"--cwd={given[1]}"]),
    "gpus": ("(?=.)" + SBATCH_GPUS, translate_gpus),
    "gpus-per-node": ("(?=.)" + SBATCH_GPUS, translate_gpus),
    "gres": (f"(?:.*,)?gpu(?::{SBATCH_GPUS})?(?:,.*)?", translate_gpus),
    "time": (r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", translate_limit),
    "array": (f"({ARRAY_PART}(?:,{ARRAY_PART})*)(?:%([1-9]\\d*))?", translate_array),
    "signal": (r"(?:[BR]+:)?(?:SIG)?([A-Z]\w*)(?:@(\d+))?", lambda given: [f"--warn={given[1]}@{given[2] or 60}s"]),
    "begin": (".+", lambda given: ["--begin=" + re.sub(r"^now\+(\d+)([smhdw]?)[a-z]*$", r"+\1\2", given[0])]),
    "hold": ("", lambda given: ["--hold"]),
    "export": (".+", lambda given: [f"--env={pair}" for pair in given[0].split(",") if "=" in pair]),
    "dependency": (r"(after(ok|any)(:\w+)+(,|$))+", lambda given: [
        f"--after{'-any' if kind == 'any' else ''}={ids.replace(':', ',')}"
        for kind, ids in re.findall(r"after(ok|any):([\w:]+)", given[0])])}

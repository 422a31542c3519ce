"""Scripts: the comments at their beginning that hold options, and a script as a command.

Options may stand in lines like `#NEXUS --gpus 2`, or be sbatch's after #SBATCH: sbatch_options.py knows those.
"""

from __future__ import annotations

import json
import operator
import re

from ..values.errors import NexusError
from ..values.text import format_line

# For allowed_script_paths.  Other interpreters (Rscript, zsh, lua) run files of the directory or the home as well: make
# such a script executable, with the interpreter in its first line.
INTERPRETERS = {r"(?:python|pypy)[0-9.]*": (".py",), "bash|sh": (".sh", ".bash")}      # {name: endings of its scripts}
SHELL_CHARACTERS = r"[;&|<>()$`\\\"'*?\[\]{}~#!\n\r]"


def parse_script(command: str) -> tuple[str, str, list[str]]:
    """(interpreter or "", script, arguments) of `[interpreter] SCRIPT ARGS`.  Raises: forbidden."""
    # bash takes only space and tab as blanks; split() takes more.
    found = re.search(SHELL_CHARACTERS, command) or re.search(r"[^\S \t]|[\x00-\x08\x0e-\x1f\x7f-\x9f]", command)
    words = command.split()
    endings = next((row for name, row in INTERPRETERS.items() if len(words) > 1 and re.fullmatch(name, words[0])), ())
    interpreter, script, *arguments = words if endings else ["", *words]
    is_path = script.endswith(endings) if endings else "/" in script           # a bare name would be a program's
    if found or not is_path or script.startswith(("-", "+")) or "=" in script:
        fault = f"it holds {json.dumps(found[0])}" if found else f"{format_line(script, 60)} is not a script's path"
        raise NexusError("forbidden",
                         f"only `[interpreter] SCRIPT ARGUMENTS` may be run here (allowed_script_paths), and {fault}",
                         hint="put the rest into the script; interpreters are python and pypy for .py files, bash and "
                              "sh for .sh, without options; or name an executable file by its path")
    return interpreter, script, arguments


# The comment lines that a script begins with may hold options: `#NEXUS --gpus 2`, or sbatch's after #SBATCH.

def parse_directives(text: str) -> list[tuple[int, str, str]]:
    """[(line number, NEXUS or SBATCH, the options)]; those after NEXUS come last, as they count more."""
    found = []
    for number, line in enumerate(list_header(text), 1):
        match = re.match(r"#(NEXUS|SBATCH)\s+(.*)", line)
        found += [(number, match[1], match[2])] if match else []
    return sorted(found, key=operator.itemgetter(1), reverse=True)


def list_header(text: str) -> list[str]:
    """The lines of a script before its first command."""
    import itertools
    return [*itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())]


# Of PBS, LSF, Moab, Cobalt, OAR, Fujitsu's, HyperQueue, Grid Engine, gflow and Flux; `#$HOME` and `# PBS` are comments
FOREIGN_DIRECTIVE = r"(#(?:PBS|BSUB|MSUB|COBALT|OAR|PJM|HQ|\$)|#\s*(?:GFLOW|flux:))\s+-"


def find_foreign_directive(text: str) -> str:
    """What the options of another scheduler begin with in a script that has none of ours, like #PBS; or empty."""
    found = [] if parse_directives(text) else [re.match(FOREIGN_DIRECTIVE, line) for line in list_header(text)]
    return next((match[1] for match in found if match), "")

"""Words of other queues, their options and their scripts, and what they are here."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from shlex import quote

from ..formats.sbatch_options import explain_sbatch
from ..formats.scripts import parse_directives
from ..machine.log_reader import read_part
from ..machine.search_path import find_program
from ..values.job import CANCELLED, COMPLETED, FAILED, PENDING, PRIORITY_TEXT, RUNNING
from ..values.schema import fits_alone
from .transport import DISK

# {a word of other queues and of the shell: our words}
ALIASES: Mapping[str, Sequence[str]] = {
    "squeue": ["jobs", "--status", "running,pending"], "ls": ["jobs"], "list": ["jobs"], "ps": ["jobs"],
    "sacct": ["history"], "sinfo": ["status"], "gpus": ["status"], "gpu": ["status"], "nvidia-smi": ["status"],
    "watch": ["top"], "rm": ["remove"], "scancel": ["cancel"], "delete": ["cancel"], "submit": ["add"],
    "sbatch": ["add"], "srun": ["run"], "tail": ["logs", "-f"], "cat": ["logs"], "info": ["show"], "seff": ["show"],
    "sstat": ["show"], "describe": ["show"], "inspect": ["show"], "hold": ["pause"], "release": ["resume"],
    "requeue": ["retry"], "resubmit": ["retry"], "rerun": ["retry"], "nodes": ["node"], "sattach": ["attach"],
    "sreport": ["usage"], "sprio": ["queue"]}
ALL_END = "all that wait or run: nexus cancel --status pending,running"
# {our commands, and what is typed there by who knows Slurm or ts (status: nothing but an option): what to type}.  {} is
# the value that stands there; after | is what to type without one
FOREIGN = {f"{command} {word}": hint for key, hint in {
    "add -p -A -q -N -c --partition --account --qos --nodes --ntasks --cpus-per-task --exclusive": "leave it out",
    "add --mem --mem-per-cpu --mem-per-gpu --memory": "leave it out; of a GPU's memory: --gpu-mem {}",
    "add --ntasks-per-node --constraint --reservation --comment --gres-flags --no-requeue": "leave it out",
    "add --mail-type --mail-user": "leave it out; a mail for each job: on_finish, in nexus config edit",
    "add -w": "--node {}",
    "add --wrap": "the command itself, in quotes", "add -W --wait": "nexus run, or nexus wait ID",
    "add -e": "--env NAME=VALUE", "add --parsable": "leave it out: add prints the id alone",
    "add --test-only": "--dry-run", "jobs -u": "--user {}", "jobs --me": '--user "$USER"',
    "jobs -j --jobs": "nexus show {}", "show -j --jobs": "nexus show {}",
    "jobs -t -s --state --states --status": "--status {status}",
    "jobs running pending failed": "--status running,failed",
    "jobs -S --starttime --since": "--since {since}", "usage --since": "--since {since}",
    "jobs -a --allusers": "leave it out", "jobs -o -O --format": "--columns id,status,runtime,command; or --json",
    "jobs -n --jobname": "--name {}", "pause -n --jobname": "--name {}",
    "add --pty -it": "--tty: nexus run --tty bash", "kill -9 -KILL -SIGKILL": "--signal KILL",
    "kill -2 -INT -SIGINT": "--signal INT", "kill -15 -TERM -SIGTERM": "leave it out: TERM comes first",
    "kill -s": "--signal {}", "wait --timeout -t": "timeout {} nexus wait ID",
    "cancel all --all --me": ALL_END, "stop --all": ALL_END,
    "cancel -u": "nexus cancel --user {}", "cancel -n --jobname": "nexus cancel --name {}",
    "cancel -t --state": "nexus cancel --status {status}", "cancel -s": "nexus kill --signal {} ID",
    "logs --tail --lines": "-n {}|-n 5",
    "edit --set": "the whole command: nexus edit ID -- COMMAND; or cancel it, and nexus retry ID --set {}",
    "status -l": "nexus jobs", "status -t": "nexus logs -f {}|nexus logs -f", "status -c": "nexus logs {}|nexus logs",
    "status -k": "nexus kill {}|nexus kill ID", "status -r": "nexus remove {}|nexus remove ID",
    "status -w": "nexus wait {}|nexus top shows it as it changes; nexus wait ID waits for a job's end",
    "status -C": "nexus clear --all", "status -K": "nexus stop",
    "status -u": "nexus move {0} --first; of a user: nexus jobs --user {0}|nexus move ID --first",
    "status -i": "nexus show {}|nexus show ID",
    "nexus scontrol": "nexus show ID, edit ID --time 2h, hold ID, release ID, or node list",
    "nexus salloc": "nexus run --tty bash: a shell on a GPU",
    "nexus upgrade update": "run the new nexus.py: python3 nexus.py install, then nexus restart (jobs go on)",
}.items() for command, *words in [key.split()] for word in words}
# Of these, without a value
SWITCHES = ("--exclusive", "-W", "--wait", "--parsable", "--test-only", "-H", "--hold", "--pty", "-it", "--no-requeue")
SAME = {"run": "add", "edit": "add", "retry": "add", "history": "jobs", "queue": "jobs", "kill": "cancel",
        "resume": "pause"}                      # in FOREIGN
# {what scontrol is told to do, perhaps with what: what to type}
SCONTROL = {"top": "nexus move {} --first", "hold": "nexus hold {}", "release": "nexus release {}",
            "requeue": "nexus retry {}", "update": "nexus edit {}", "show": "nexus show {}",
            "show node": "nexus node list", "show nodes": "nexus node list", "show partition": "nexus status",
            "show config": "nexus config"}
# {a field of a job in `scontrol update`: sbatch's option for it}
SCONTROL_FIELDS = {"timelimit": "time", "jobname": "job-name", "name": "job-name", "starttime": "begin",
                   "dependency": "dependency", "gres": "gres", "priority": "priority"}
# {a state in squeue and sacct: our status}
SLURM_STATES = {"pd": PENDING, "r": RUNNING, "cg": RUNNING, "completing": RUNNING, "cd": COMPLETED, "f": FAILED,
                "to": FAILED, "timeout": FAILED, "oom": FAILED, "out_of_memory": FAILED, "nf": FAILED,
                "node_fail": FAILED, "ca": CANCELLED}


def join_command(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else " ".join(map(quote, words))


def complete_command(line: str, folder: str = "") -> str:
    """The command, with what runs the file that its first word is, when a shell would not find it."""
    first = line.partition(" ")[0]
    local = os.path.join(folder, first)
    is_executable = os.path.isfile(local) and os.access(local, os.X_OK)
    if not os.path.isfile(local) or (is_executable and "/" in first):
        return line
    if find_program(first) or find_script(first, folder):
        return line
    python = "python" if find_program("python") else "python3"
    runners = {".py": python, ".ipynb": "jupyter nbconvert --to notebook --execute --inplace"}
    runner = runners.get(os.path.splitext(first)[1])
    if runner:
        return f"{runner} {line}"
    return f"./{line}" if is_executable else f"bash {line}"


def read_script_text(path: str) -> str:
    """The first part of a text file; empty for any other."""
    content = read_part(DISK, path, 0, 2**16) if os.path.isfile(path) else b""
    return "" if b"\0" in content else content.decode("utf-8", "replace")


def find_script(first: str, cwd: str | None) -> str:
    """The file of a command's first word, when that begins with #! or has options; empty otherwise."""
    path = next(filter(os.path.isfile, [os.path.join(cwd or "", first), first]), "")
    text = read_script_text(path)
    if not text.startswith("#!") and not parse_directives(text):
        return ""
    program = find_program(first)               # a command of that name
    return path if not program or os.path.samefile(program, path) else ""


# {command: its options of which one is given}
SINGLE_OPTIONS = {**dict.fromkeys(("jobs", "history", "queue", "usage"), ("--csv", "--json")),
                  "status": ("--watch", "--detailed", "--json"),
                  "move": ("--first", "--last", "--before", "--priority")}


def translate_word(name: str, flag: str, words: Sequence[str]) -> str:
    """What to type for a word of another queue, as `-u ann`, `-uann` or `--state=pending`; "" if it is not known."""
    for key, value in ((flag, words[0].partition("=")[2]), (flag[:2] if flag[1:2] != "-" else "", flag[2:])):
        hint = FOREIGN.get(f"{name} {key}") or FOREIGN.get(f"{SAME.get(name)} {key}")
        if key and hint:
            given = value or "".join(word for word in words[1:2] if word[:1] != "-")
            if key == "-p" and fits_alone(PRIORITY_TEXT, given):        # and no partition
                return f"--priority {given}"
            hint = hint.partition("|")[0 if given or "|" not in hint else 2]
            given = given or "NAME"
            return hint.format(quote(given), status=translate_states(given), since=translate_since(given))
    return ""


def translate_states(text: str) -> str:
    """Our statuses for states of Slurm, as `PD,RUNNING`."""
    given = text.lower().split(",")
    return quote(",".join(dict.fromkeys(SLURM_STATES.get(state, state) for state in given)))


def translate_since(text: str) -> str:
    """Our --since for a time of sacct, as `now-2days`, `2days` or `2024-10-24`; a day for any other."""
    import datetime
    if match := re.fullmatch(r"(?:now-)?(\d+)([smhdw])[a-z]*", text):
        return match[1] + match[2]
    with contextlib.suppress(ValueError):
        return f"{max(1, (datetime.date.today() - datetime.date.fromisoformat(text[:10])).days + 1)}d"
    return "1d"


def translate_scontrol(words: Sequence[str]) -> str:
    """What to type for `scontrol hold 12`, or `scontrol update JobId=12 TimeLimit=30`; "" if it is not known."""
    line = SCONTROL.get(" ".join(words[:2])) or SCONTROL.get("".join(words[:1]), "")
    named, changed = list[str](), list[str]()
    for word in words[1:]:
        key, _, value = word.rpartition("=")
        name = SCONTROL_FIELDS.get(key.lower())
        if name:
            changed.append(explain_sbatch([f"--{name}={value}"]) or f"--{name} {quote(value)}")
        elif key.lower() in ("", "job", "jobid", "joblist") and value.lower() not in ("job", "jobs", "jobid"):
            named += map(quote, value.split(","))
    return " ".join([line.format(" ".join(named) or "ID"), *changed]) if line else ""

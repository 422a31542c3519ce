#!/usr/bin/env python3
"""Join the rooms of src/ into nexus.py, the one file that is copied and run.

    python3 build.py                write nexus.py
    python3 build.py --check        say whether nexus.py is what the rooms make; the exit code is 1 if not
    python3 build.py --where LINE   say which line of which file a line of nexus.py comes from

A room is a module of the package src, which imports what it needs of the rooms above it, name by name.  In nexus.py all
are one module: imports between rooms are dropped, all others at the top of a room come once, at the top of nexus.py, and
no two rooms define one name.  `NAME = text_of("job.sh")` becomes the text of that file.  Nothing else is changed.
"""

import ast
import pathlib
import re
import sys

# From top to bottom: a room uses only rooms above it.
FOLDERS = {
    "": "opening",
    "values": (
        "value errors text schema config causes job bid gpu state usage queue_order dependencies changes sweep "
        "submission choice"),
    "formats": (
        "codec state_file log_lines nvidia_smi submit_form proc runner_events jobs_file cause_lines metrics "
        "progress slurm scripts sbatch_options gpu_history"),
    "schedule": "turns reasons capacity preemption limits quotas explain plan ends signals estimates",
    "views": "api_json row_labels status_text show job_tables usage results chosen_columns openapi prometheus",
    "machine": (
        "clock disk layout config_file tokens job_files log_reader history_files processes scratch search_path "
        "programs inherited gpu_sources peers leases bids launchers slurm_commands machine ssh git"),
    "runner": "script environment claims supervisor",
    "store": "recovery conflicts store",
    "hosting": (
        "events observer termination hosted_job job_host loop node_protocol agent slurm node_line node_news "
        "node_questions node pool"),
    "service": (
        "outcomes starter jobs_file hooks access selection dependencies queue_limits script_rules validation "
        "transactions admission editing cancellation gpu_watch gpu_history turn_taking disk_use housekeeping log_watch health "
        "job_lists estimates explanation job_serializer groups status overview service"),
    "server": (
        "routes gate api service_routes job_routes log_routes upload_routes connections handler listener endpoint service_log "
        "service_lock start"),
    "page": "page",
    "cli": (
        "transport find_service channel client terminal context other_queues parser top chosen attach submit run "
        "lists change logs control restart config tokens nodes install options commands main"),
}
ROOMS = [f"{folder}/{name}".strip("/") for folder, names in FOLDERS.items() for name in names.split()]
TOP = pathlib.Path(__file__).resolve().parent
IMPORTS = (ast.Import, ast.ImportFrom)


class Fault(Exception):
    """What cannot be joined: the file, the line, and why."""


def list_names(node):
    """The names that a statement at the top of a module defines, imports aside."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.If, ast.Try, ast.With)):
        return [name for inner in ast.iter_child_nodes(node) for name in list_names(inner)]
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return [each.id for target in targets for each in ast.walk(target)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def check_import(room, node, is_typing):
    """Raises: Fault, when a room may not import so from another."""
    at, base = f"src/{room}.py:{node.lineno}", room.split("/")[:-1]
    target = "/".join([*base[:len(base) + 1 - node.level], *filter(None, [node.module])]).replace(".", "/")
    if any(alias.asname or alias.name == "*" for alias in node.names):
        raise Fault(f"{at}: a name of another room is imported as it is, without `as` and `*`")
    if target and target not in ROOMS:
        raise Fault(f"{at}: there is no room {target}.py in the list of build.py")
    if target and not is_typing and ROOMS.index(target) >= ROOMS.index(room):
        raise Fault(f"{at}: {target}.py stands below: a room uses those above it, and others only under TYPE_CHECKING")


def read_text(path):
    """[(line, file, its number)] of a file that becomes a string.  A page gets the style and the scripts that it names."""
    name, lines = path.relative_to(TOP).as_posix(), []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        part = re.fullmatch(r'<(?:link rel="stylesheet" href|script src)="([\w.-]+)">(?:</script>)?', line)
        if "'''" in line:
            raise Fault(f"{name}:{number}: three quotes would end the string in nexus.py")
        if part and path.suffix == ".html":
            tag = "style" if part[1].endswith(".css") else "script"
            if lines[-1][0] == f"</{tag}>":                     # scripts that follow each other become one
                lines[-1] = ("", name, number)
            else:
                lines.append((f"<{tag}>", name, number))
            lines += [*read_text(path.parent / part[1])[:-1], (f"</{tag}>", name, number)]
        else:                                                   # the line for shellcheck is not a part of the text
            lines.append((re.sub("^# shellcheck shell=.*", "", line), name, number))
    return lines


def read_room(room, names, imports, texts):
    """({line number: its lines in nexus.py}, the tree) of a room.  Raises: Fault.

    Added to are `names`, {name: (what it is, file, line)}, `imports`, {whether for typing: {(module, name)}}, and
    `texts`, the files that became strings.
    """
    path = f"src/{room}.py"
    source = (TOP / path).read_text(encoding="utf-8")
    tree, kept = ast.parse(source, path), {n: [(line, path, n)] for n, line in enumerate(source.split("\n"), 1)}

    def define(name, kind, node):
        former = names.setdefault(name, (kind, path, node.lineno))
        if former[0] != kind and former[1] != path:
            raise Fault(f"{path}:{node.lineno}: {name} is defined in {former[1]}:{former[2]}, too")

    def take_import(node, is_typing):
        module = getattr(node, "module", None) or ""
        if getattr(node, "level", 0):
            check_import(room, node, is_typing)
        elif module != "__future__":
            for alias in node.names:
                define((alias.asname or alias.name).split(".")[0], f"import {module}", node)
                imports[is_typing].add((module, ast.unparse(alias)))
        for number in range(node.lineno, node.end_lineno + 1):
            kept[number] = []

    for node in tree.body:
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        taken = [each for each in (node.body if is_typing else [node]) if isinstance(each, IMPORTS)]
        if is_typing and taken == node.body and node.orelse:
            taken = []                                          # an import that means something else at run time stays
        for each in taken:
            take_import(each, is_typing)
        if is_typing and taken == node.body:
            kept[node.lineno] = []
        for each in ast.walk(node):
            if isinstance(each, ast.ImportFrom) and each.level and each not in taken:
                raise Fault(f"{path}:{each.lineno}: rooms are imported at the top of a room")
        for name in list_names(node):
            define(name, path, node)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("text_of("):
            texts.append((TOP / path).parent / node.value.args[0].value)
            lines = kept[node.lineno] = read_text(texts[-1])
            lines[0] = (f"{node.targets[0].id} = r'''{lines[0][0]}", *lines[0][1:])
            lines[-1] = (f"{lines[-1][0]}'''", *lines[-1][1:])
    return kept, tree


def format_imports(found, indent=""):
    """The lines of nexus.py for {(module or "", name)}."""
    modules = {}
    for module, name in sorted(found):
        modules.setdefault(f"from {module} " if module else f"import {name}", []).append(name)
    return [(f"{indent}{words}{'import ' + ', '.join(names) if words.endswith(' ') else ''}", "build.py", 0)
            for words, names in sorted(modules.items(), key=lambda row: (row[0].endswith(" "), row))]


def join():
    """[(line of nexus.py, the file it comes from, its number there)].  Raises: Fault."""
    names, imports, texts, joined = {}, {False: set(), True: set()}, [], []
    rooms = {room: read_room(room, names, imports, texts) for room in ROOMS}
    for path in sorted((TOP / "src").rglob("*.py")):
        room = path.relative_to(TOP / "src").with_suffix("").as_posix()
        if room not in ROOMS and path not in texts and room != "__init__":
            raise Fault(f"src/{room}.py:1: it is not in the list of build.py")
    for room, (kept, tree) in rooms.items():
        name, docstring = f"src/{room}.py", tree.body[0]
        if room == ROOMS[0]:
            future = next(node.lineno for node in tree.body if isinstance(node, IMPORTS))
            typing = next(node.lineno for node in tree.body if isinstance(node, ast.If))
            kept[future] = [("from __future__ import annotations", name, future), ("", name, future)]
            kept[future] += format_imports(imports[False])
            kept[typing] += format_imports(imports[True] - imports[False], "    ")
            joined += [line for lines in kept.values() for line in lines]
            continue
        body = [line for number, lines in kept.items() if number > docstring.end_lineno for line in lines]
        while not body[0][0]:
            body.pop(0)
        while not joined[-1][0]:
            joined.pop()
        words = ["", "", f"# ==== {name} ===="]
        words += [f"# {line}" for line in ast.get_docstring(tree).split("\n") if line]
        joined += [(line, name, 1) for line in [*words, ""]] + body
    return joined


def main(words):
    joined, output = join(), TOP / "nexus.py"
    text = "\n".join(line for line, _, _ in joined)
    if words[:1] == ["--where"] and len(words) == 2 and words[1].isdigit() and 0 < int(words[1]) <= len(joined):
        print(*joined[int(words[1]) - 1][1:], sep=":")
    elif words == ["--check"]:
        if not output.exists() or output.read_text(encoding="utf-8") != text:
            raise Fault("nexus.py is not what src/ makes: run python3 build.py")
    elif words:
        sys.exit(__doc__)
    else:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Fault as fault:
        sys.exit(str(fault))

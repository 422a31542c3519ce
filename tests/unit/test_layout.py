"""The file as a whole: its sections, who may use what."""

import ast
import pathlib
import re
import subprocess
import sys

import nexus

SOURCE = pathlib.Path(nexus.__file__).read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)
SECTIONS = ["ERRORS", "TEXT", "SCHEMA", "MODEL", "FORMATS", "SCHEDULER", "VIEWS",
            "CLOCK", "DISK", "MACHINE", "RUNNER",
            "STORE", "HOST", "SLURM", "NODES", "OUTCOMES", "SERVICE", "SERVER", "START",
            "CLIENT", "COMMANDS", "ARGUMENTS, MAIN", "PAGE"]
BANNERS = [(SOURCE[: match.start()].count("\n") + 1, int(match[1]), match[2])
           for match in re.finditer(r"^# ==== (\d+)\. ([A-Z, ]+) ====", SOURCE, re.MULTILINE)]
VALUES = range(BANNERS[0][0], next(line for line, number, _ in BANNERS if number == 8))      # the lines of part I


def section_of(line):
    return max((number for start, number, _ in BANNERS if start <= line), default=0)


def test_sections_stand_in_their_order():
    assert [(number, name) for _, number, name in BANNERS] == list(enumerate(SECTIONS, 1))[: len(BANNERS)]
    assert len(re.findall("^# ====", SOURCE, re.MULTILINE)) == len(BANNERS), "grep prints the table of contents"


def bound_names(node):
    """Names that a function, lambda or comprehension binds for itself."""
    found = set()
    arguments = getattr(node, "args", None)
    if isinstance(arguments, ast.arguments):
        found |= {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}
    body = node.body if isinstance(node, ast.Lambda) else node
    shared = set()
    for each in ast.walk(body):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.add(each.id)
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and each is not node:
            found.add(each.name)
        elif isinstance(each, ast.alias):
            found.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, (ast.Global, ast.Nonlocal)):
            shared |= set(each.names)
    return found - shared


SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def global_uses(node, hidden=frozenset()):
    """(name, line) of each name that is looked up in the module, in annotations too."""
    if isinstance(node, SCOPES):
        hidden = hidden | bound_names(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
        yield node.id, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from global_uses(child, hidden)


def definitions():
    """{name: line of its first definition at the top of the file}."""
    found = {}

    def visit(statements):
        for node in statements:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, node.lineno)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    found.setdefault((alias.asname or alias.name).partition(".")[0], node.lineno)
            elif isinstance(node, (ast.If, ast.Try, ast.For, ast.While, ast.With)):
                for part in ("body", "orelse", "handlers", "finalbody"):
                    visit(getattr(node, part, []))
            elif isinstance(node, ast.ExceptHandler):
                visit(node.body)
            for each in ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.For)) else ():
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                    found.setdefault(each.id, node.lineno)

    visit(TREE.body)
    return found


# A part of the service is given the whole, and says so; the page is last so that nobody has to scroll past it.
MAY_BE_BELOW = {"Service", "DASHBOARD_PAGE"}


def test_a_section_uses_only_those_above_it():
    home = definitions()
    downward = sorted({(line, f"section {section_of(line)} uses {name} of section {section_of(home[name])}")
                       for name, line in global_uses(TREE)
                       if name in home and section_of(home[name]) > section_of(line) and name not in MAY_BE_BELOW})
    assert not downward, "\n".join(f"line {line}: {fault}" for line, fault in downward)


def test_what_a_launcher_does_stands_in_its_class():
    """Nobody asks which one it is, but for Slurm's jobs: they have a backend of their own."""
    compared = {(each.value, node.lineno) for node in ast.walk(TREE) if isinstance(node, ast.Compare) and "launcher" in ast.unparse(node)
                for each in ast.walk(node) if isinstance(each, ast.Constant)}
    assert {(value, line) for value, line in compared if value in {*nexus.LAUNCHERS} - {"slurm"}} == set()


# Part I: no clock, disk, process, socket, environment, randomness

PURE_MODULES = {"base64", "__future__", "bisect", "calendar", "collections", "collections.abc", "contextlib", "csv", "datetime", "decimal",
                "difflib", "email", "fnmatch",
                "heapq", "itertools", "json", "operator", "math", "re", "shlex", "statistics", "struct", "textwrap",
                "typing", "typing_extensions",
                "functools", "hashlib", "hmac", "html", "string", "unicodedata", "xml.etree", "xml.etree.ElementTree", "zlib"}
PURE_OF_TIME = {"strftime": 2, "gmtime": 1, "localtime": 1, "strptime": 2}      # with so many arguments
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}


def nodes_of_values():
    return [each for each in ast.walk(TREE) if getattr(each, "lineno", 0) in VALUES]


def test_values_import_nothing_that_touches_the_world():
    found = set()
    for node in nodes_of_values():
        if isinstance(node, ast.Import):
            found |= {(alias.name, node.lineno) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module, node.lineno))
    assert {(name, line) for name, line in found if name not in PURE_MODULES} == set()


def test_values_use_no_clock_disk_process_socket_environment_or_randomness():
    imported = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    impure = imported - PURE_MODULES - {"time"} | IMPURE_BUILTINS
    uses = {(name, line) for name, line in global_uses(TREE) if line in VALUES}
    assert {(name, line) for name, line in uses if name in impure} == set()
    clock = {(node.attr, node.lineno) for node in nodes_of_values()
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"}
    assert {(name, line) for name, line in clock if name not in PURE_OF_TIME} == set()
    for node in nodes_of_values():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PURE_OF_TIME:
            assert len(node.args) >= PURE_OF_TIME[node.func.attr], f"line {node.lineno}: it asks the clock"


# Files: sections 9 to 19 reach them by the operations of Disk, so that a test or a simulation can have a disk of its own

FILE_CALLS = {"access", "chmod", "chown", "close", "dup", "fchmod", "fchown", "fdatasync", "fdopen", "fstat", "fsync", "ftruncate", "link",
              "listdir", "lseek", "lstat", "makedirs", "mkdir", "mkfifo", "open", "pread", "pwrite", "read", "readlink", "remove",
              "removedirs", "rename", "renames", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs", "symlink", "truncate",
              "unlink", "utime", "walk", "write", "exists", "getatime", "getctime", "getmtime", "getsize", "isdir", "isfile", "islink",
              "ismount", "lexists", "realpath", "samefile"}                         # of os and os.path
FILE_MODULES = {"fcntl", "glob", "pathlib", "shutil", "tempfile"}
OTHER_FILES = {  # who reaches files that are not on that disk: which
    "Disk": "it is the disk",
    **dict.fromkeys(("run", "open_scratch", "read_scratch"), "files without a name, for what a program prints"),
    **dict.fromkeys(("find_program", "spawn", "is_own_folder"), "the programs on PATH"),
    **dict.fromkeys(("withhold_descriptors", "read_proc", "read_proc_words", "Processes", "find_process_user", "find_pid_namespace"),
                    "the kernel's"),
    **dict.fromkeys(("take_snapshot", "check_sizes", "push_large_files"), "a user's work tree, and git's"),
    **dict.fromkeys(("RunnerEvents", "AgentLine", "open_socket_path"), "pipes and sockets"),
    "ScriptRules": "users' scripts", "service_argv": "what Python has compiled", "make_log": "service.log, which logging writes"}


def file_calls(node, scope=""):
    """(the function or class at the top of the file, what of a file it calls, line)."""
    for child in ast.iter_child_nodes(node):
        name = scope or (child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else "")
        if isinstance(child, ast.Attribute):
            owner = ast.unparse(child.value)
            if owner in FILE_MODULES or (owner in ("os", "os.path") and child.attr in FILE_CALLS):
                yield name, f"{owner}.{child.attr}", child.lineno
        elif isinstance(child, ast.Name) and child.id == "open":
            yield name, "open", child.lineno
        yield from file_calls(child, name)


def test_files_are_reached_through_disk():
    first, last = [SECTIONS.index(name) + 1 for name in ("DISK", "START")]
    calls = [each for each in file_calls(TREE) if first <= section_of(each[2]) <= last]
    assert [f"line {line}: {name} calls {call}" for name, call, line in calls if name not in OTHER_FILES] == []
    assert OTHER_FILES.keys() == {name for name, _, _ in calls}, "who needs no row any more has none"


def test_the_import_is_light():
    """What a plain `nexus add` does not need is imported where it is used."""
    heavy = {"typing", "dataclasses", "subprocess", "http", "argparse", "asyncio", "logging", "tomllib", "tomli",
             "psutil", "ssl", "email", "threading", "multiprocessing", "inspect", "urllib", "difflib", "random", "csv",
             "statistics"}
    before = "import sys; known = set(sys.modules); import nexus; print(*(set(sys.modules) - known))"
    loaded = subprocess.run([sys.executable, "-S", "-c", before], cwd=pathlib.Path(nexus.__file__).parent,
                            check=True, timeout=60, capture_output=True, text=True).stdout.split()
    assert heavy & {name.partition(".")[0] for name in loaded} == set()


def test_the_service_imports_at_its_start_what_its_functions_import():
    """Its Python may be removed while it runs."""
    first = next(line for line, _, name in BANNERS if name == "CLIENT")
    local = {name for function in ast.walk(TREE) if isinstance(function, ast.FunctionDef) and function.lineno < first
             for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    at_the_start = {"tomllib", "tomli",             # load_config()
                    "psutil", "ssl", "importlib"}   # Machine, load_tls(), import_modules()
    run = "import sys, nexus; nexus.import_modules(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-S", "-c", run], cwd=pathlib.Path(nexus.__file__).parent, check=True, timeout=60,
                            capture_output=True, text=True).stdout.split()
    assert local - at_the_start - set(loaded) == set() and set(nexus.MODULES) <= set(loaded)
    named = {node.args[0].value for node in ast.walk(TREE) if isinstance(node, ast.Call) and node.args
             and getattr(node.func, "attr", "") in ("encode", "decode") and isinstance(node.args[0], ast.Constant)}
    codecs = {f"encodings.{name.replace('-', '_')}" for name in named - {"utf-8", "latin-1", "ascii"}}      # built in
    assert codecs and codecs <= set(loaded)


def test_no_line_is_wider_than_a_window():
    assert [number for number, line in enumerate(SOURCE.splitlines(), 1) if len(line) > 120] == []


def test_no_function_is_too_long_to_be_read():
    assert [f"{node.name}: {lines} lines" for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)
            if (lines := node.end_lineno - node.lineno + 1) > 70] == []


# A reason, an error or a fault says why something cannot be.  What is called otherwise is a hold, or a key of a contract.
WHY_NOTS = {"why", "whynot", "why_not", "trouble", "closed", "blocker", "hold", "obstacle", "problem", "issue", "silence"}
OTHER_WORDS = {("Group", "hold"), ("count_group_end", "hold"), ("Admission.set_paused.change", "hold"),
               ("Report", "trouble"), ("Agent.reply", "trouble")}


def list_names(node, scope=""):
    """(class or function, name) of each field, attribute, parameter and local."""
    for child in ast.iter_child_nodes(node):
        is_set = isinstance(getattr(child, "ctx", None), ast.Store)
        if is_set and isinstance(child, ast.Name):
            yield scope, child.id
        elif is_set and isinstance(child, ast.Attribute):
            yield scope, child.attr
        elif isinstance(child, ast.arg):
            yield scope, child.arg
        inner = f"{scope}.{child.name}".strip(".") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else scope
        yield from list_names(child, inner)


def test_what_cannot_be_has_a_reason_an_error_or_a_fault():
    assert {(scope, name) for scope, name in list_names(TREE) if name in WHY_NOTS} == OTHER_WORDS


def test_a_name_says_what_it_is():
    """`one` of what, `known` by whom?  A job, a GPU's capacity, the candidates."""
    assert {(scope, name) for scope, name in list_names(TREE) if name in ("one", "known")} == set()


def list_hidden(node, names, inside=()):
    """(function, name) of each parameter, local, or inner function that hides a function or class of the module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.Lambda)):
            given = child.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            yield from ((".".join(inside), one.arg) for one in arguments if one and one.arg in names)
            if isinstance(child, ast.FunctionDef) and isinstance(node, ast.FunctionDef) and child.name in names:
                yield ".".join(inside), child.name
        is_local = inside and not inside[-1][0].isupper()                   # a field of a class hides nothing in its methods
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and child.id in names and is_local:
            yield ".".join(inside), child.id
        name = getattr(child, "name", "") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
        yield from list_hidden(child, names, (*inside, name) if name else inside)


def test_no_local_hides_a_function():
    names = {node.name for node in TREE.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert list(list_hidden(TREE, names)) == []
    sample = ast.parse("def run(): pass\nclass A:\n  run: int = 1\n  def f(self, run): pass\ndef g():\n  run = 1\n  def run(): pass\n")
    assert list(list_hidden(sample, {"run"})) == [("A", "run"), ("g", "run"), ("g", "run")]

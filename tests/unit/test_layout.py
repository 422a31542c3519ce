"""The rooms and the file that they make: who may use what, how long things are, what they are called."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

import build
import nexus

pytestmark = pytest.mark.xdist_group("layout")          # the rooms are parsed once


@functools.lru_cache(None)
def parse_rooms():
    """{room: its tree}."""
    return {room: ast.parse((build.TOP / f"src/{room}.py").read_text(encoding="utf-8")) for room in build.ROOMS}


@functools.lru_cache(None)
def list_nodes():
    """[(room, node)] of all rooms."""
    return [(room, node) for room, tree in parse_rooms().items() for node in ast.walk(tree)]


def is_of_values(room):
    return room.split("/")[0] in ("opening", "values", "formats", "schedule", "views")


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


def test_each_file_of_tests_in_a_folder_is_about_a_room():
    files = {path.relative_to(build.TOP / "tests/unit").as_posix() for path in (build.TOP / "tests/unit").glob("*/test_*.py")}
    assert files - {f"{folder}/test_{name}.py" for folder, _, name in (room.partition("/") for room in build.ROOMS)} == set()


def test_what_a_launcher_does_stands_in_its_class():
    """Nobody asks which one it is, but for Slurm's jobs: they have a backend of their own."""
    names = {*nexus.LAUNCHERS} - {"slurm"}
    assert [f"src/{room}.py:{node.lineno}" for room, node in list_nodes() if isinstance(node, ast.Compare)
            and any(isinstance(each, ast.Constant) and each.value in names for each in ast.walk(node))
            and "launcher" in ast.unparse(node)] == []


# opening, values, formats, schedule, views: no clock, disk, process, socket, environment, randomness

PURE_MODULES = {"base64", "__future__", "bisect", "calendar", "collections", "collections.abc", "contextlib", "csv", "datetime", "decimal",
                "difflib", "email", "fnmatch",
                "heapq", "itertools", "json", "operator", "math", "re", "shlex", "statistics", "struct", "textwrap",
                "typing", "typing_extensions",
                "functools", "hashlib", "hmac", "html", "string", "unicodedata", "xml.etree", "xml.etree.ElementTree", "zlib"}
PURE_OF_TIME = {"strftime": 2, "gmtime": 1, "localtime": 1, "strptime": 2}      # with so many arguments
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}


def nodes_of_values():
    return [(room, node) for room, node in list_nodes() if is_of_values(room)]


def test_values_import_nothing_that_touches_the_world():
    found = set()
    for room, node in nodes_of_values():
        if isinstance(node, ast.Import):
            found |= {(room, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((room, node.module))
    assert {(room, name) for room, name in found if name not in PURE_MODULES | {"time"}} == set()


def test_values_use_no_clock_disk_process_socket_environment_or_randomness():
    assert {(room, name) for room, tree in parse_rooms().items() if is_of_values(room) for node in tree.body
            if any(isinstance(each, ast.Name) and each.id in IMPURE_BUILTINS for each in ast.walk(node))
            for name, _ in global_uses(node) if name in IMPURE_BUILTINS} == set()
    clock = {(room, node.attr) for room, node in nodes_of_values()
             if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"}
    assert {(room, name) for room, name in clock if name not in PURE_OF_TIME} == set()
    for room, node in nodes_of_values():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PURE_OF_TIME:
            assert len(node.args) >= PURE_OF_TIME[node.func.attr], f"src/{room}.py:{node.lineno}: it asks the clock"


# Files: from machine/ to server/ they are reached by the operations of Disk, so that a test or a simulation can have a disk of its own

FILE_CALLS = {"access", "chmod", "chown", "close", "dup", "fchmod", "fchown", "fdatasync", "fdopen", "fstat", "fsync", "ftruncate", "link",
              "listdir", "lseek", "lstat", "makedirs", "mkdir", "mkfifo", "open", "pread", "pwrite", "read", "readlink", "remove",
              "removedirs", "rename", "renames", "replace", "rmdir", "scandir", "sendfile", "stat", "statvfs", "symlink", "truncate",
              "unlink", "utime", "walk", "write", "exists", "getatime", "getctime", "getmtime", "getsize", "isdir", "isfile", "islink",
              "ismount", "lexists", "realpath", "samefile"}                         # of os and os.path
FILE_MODULES = {"fcntl", "glob", "pathlib", "shutil", "tempfile"}
OTHER_FILES = {  # who reaches files that are not on that disk: which
    "Disk": "it is the disk",
    **dict.fromkeys(("run", "open_scratch", "read_scratch"), "files without a name, for what a program prints"),
    **dict.fromkeys(("look_in", "search_folders", "is_own_folder"), "the programs on PATH"),
    **dict.fromkeys(("withhold_descriptors", "read_proc", "list_threads", "read_proc_words", "Processes", "find_process_user",
                     "find_pid_namespace"), "the kernel's"),
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
    calls = [(room, *call) for room, tree in parse_rooms().items()
             if room.split("/")[0] in ("machine", "runner", "store", "hosting", "service", "server") for call in file_calls(tree)]
    assert [f"src/{room}.py:{line}: {name} calls {call}" for room, name, call, line in calls if name not in OTHER_FILES] == []
    assert OTHER_FILES.keys() == {name for _, name, _, _ in calls}, "who needs no row any more has none"


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
    local = {name for room, tree in parse_rooms().items() if not room.startswith("cli/")
             for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)
             for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))
             for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])}
    at_the_start = {"tomllib", "tomli",             # load_config()
                    "psutil", "ssl", "importlib"}   # Machine, load_tls(), import_modules()
    run = "import sys, nexus; nexus.import_modules(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-S", "-c", run], cwd=pathlib.Path(nexus.__file__).parent, check=True, timeout=60,
                            capture_output=True, text=True).stdout.split()
    assert local - at_the_start - set(loaded) == set() and set(nexus.MODULES) <= set(loaded)
    named = {node.args[0].value for _, node in list_nodes() if isinstance(node, ast.Call) and node.args
             and getattr(node.func, "attr", "") in ("encode", "decode") and isinstance(node.args[0], ast.Constant)}
    codecs = {f"encodings.{name.replace('-', '_')}" for name in named - {"utf-8", "latin-1", "ascii"}}      # built in
    assert codecs and codecs <= set(loaded)


def list_files():
    """(path, lines) of each file of src/."""
    for path in sorted((build.TOP / "src").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(build.TOP).as_posix(), path.read_text(encoding="utf-8").splitlines()


def test_no_line_is_wider_than_a_window():
    assert [f"{path}:{number}" for path, lines in list_files() for number, line in enumerate(lines, 1)
            if len(line) > 120 and not line.startswith("from .")] == []                 # nexus.py has no imports between rooms


def test_no_room_and_no_class_is_too_long_to_be_known():
    assert [f"{path}: {len(lines)} lines" for path, lines in list_files() if len(lines) > 700] == []
    assert [f"{node.name}: {lines} lines" for _, node in list_nodes() if isinstance(node, ast.ClassDef)
            if (lines := node.end_lineno - node.lineno + 1) > 300] == []


def test_no_function_is_too_long_to_be_read():
    assert [f"{node.name}: {lines} lines" for _, node in list_nodes() if isinstance(node, ast.FunctionDef)
            if (lines := node.end_lineno - node.lineno + 1) > 70] == []


# A reason, an error or a fault says why something cannot be.  What is called otherwise is a hold, or a key of a contract.
WHY_NOTS = {"why", "whynot", "why_not", "trouble", "closed", "blocker", "hold", "obstacle", "problem", "issue", "silence"}
OTHER_WORDS = {("Group", "hold"), ("count_group_end", "hold"), ("Editor.set_paused.change", "hold"),
               ("Report", "trouble"), ("Agent.reply", "trouble")}


@functools.lru_cache(None)
def list_all_names():
    return {found for tree in parse_rooms().values() for found in list_names(tree)}


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
    assert {(scope, name) for scope, name in list_all_names() if name in WHY_NOTS} == OTHER_WORDS


def test_a_name_says_what_it_is():
    """`one` of what, `known` by whom?  A job, a GPU's capacity, the candidates."""
    assert {(scope, name) for scope, name in list_all_names() if name in ("one", "known")} == set()


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
    names = {node.name for tree in parse_rooms().values() for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert [found for tree in parse_rooms().values() for found in list_hidden(tree, names)] == []
    sample = ast.parse("def run(): pass\nclass A:\n  run: int = 1\n  def f(self, run): pass\ndef g():\n  run = 1\n  def run(): pass\n")
    assert list(list_hidden(sample, {"run"})) == [("A", "run"), ("g", "run"), ("g", "run")]

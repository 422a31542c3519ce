"""nexus.py as build.py joins it, with a mutant: in memory, and only the statement with the mutant is compiled anew."""
from __future__ import annotations
import __future__

import ast
import importlib.util
import sys
import types
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from mutants import TOP, Mutant

import build

NEXUS = TOP / "nexus.py"
FLAGS = __future__.annotations.compiler_flag


class Joined:
    """The lines of nexus.py, each with its place in src, and the code of each statement at its top."""

    def __init__(self) -> None:
        joined = build.join()
        self.lines = [line for line, _, _ in joined]
        self.places = {(path, number): index for index, (_, path, number) in enumerate(joined, 1)}     # lines from 1
        self.rooms = {index: (path, number) for (path, number), index in self.places.items()}
        tree = ast.parse("\n".join(self.lines))
        self.starts = [min(node.lineno, *[each.lineno for each in getattr(node, "decorator_list", [])] or [node.lineno])
                       for node in tree.body]
        self.ends = [node.end_lineno or node.lineno for node in tree.body]
        self.nodes = tree.body
        self.codes = [compile_piece(ast.Module([node], []), 1) for node in tree.body]

    def find_line(self, room: str, number: int) -> int:
        """The line of nexus.py that a line of a room has become."""
        return self.places[f"src/{room}.py", number]

    def put_in(self, mutant: Mutant | None) -> list[types.CodeType]:
        """The code of nexus.py with a mutant in it."""
        if mutant is None:
            return self.codes
        at, code = self.compile_mutant(mutant)
        return [*self.codes[:at], code, *self.codes[at + 1:]]

    def compile_mutant(self, mutant: Mutant) -> tuple[int, types.CodeType]:
        """(which statement at the top of nexus.py a mutant changes, its code then)."""
        first, last = (self.find_line(mutant.room, number) for number in (mutant.first, mutant.last))
        at = bisect_right(self.starts, first) - 1
        start, end = self.starts[at], self.ends[at]
        piece = [*self.lines[start - 1:first - 1], *mutant.lines, *self.lines[last:end]]
        return at, compile_piece(ast.parse("\n".join(piece)), start)


def compile_piece(tree: ast.Module, start: int) -> types.CodeType:
    ast.increment_lineno(tree, start - 1)
    return compile(tree, str(NEXUS), "exec", FLAGS, True)       # type: ignore[no-any-return]


def install(codes: Sequence[types.CodeType]) -> None:
    """Have `import nexus` find this code."""
    spec = importlib.util.spec_from_loader("nexus", loader=None, origin=str(NEXUS))
    assert spec
    module = types.ModuleType("nexus")
    module.__file__, module.__spec__ = str(NEXUS), spec
    sys.modules["nexus"] = module
    for code in codes:
        exec(code, vars(module))


def exchange(joined: Joined, mutant: Mutant) -> bool:
    """Put a mutant into the nexus that is loaded: its function gets other code.  False: it is in no function's body."""
    at, code = joined.compile_mutant(mutant)
    line, node, holder = joined.find_line(mutant.room, mutant.first), joined.nodes[at], vars(sys.modules["nexus"])
    if isinstance(node, ast.ClassDef):
        code, holder = find_code(code, node.name), vars(holder[node.name])
        node = next((each for each in node.body if each.lineno <= line <= (each.end_lineno or 0)), node)
    if not isinstance(node, ast.FunctionDef) or line < node.body[0].lineno:
        return False
    code = find_code(code, node.name)
    function = unwrap(holder.get(node.name))
    if not isinstance(function, types.FunctionType) or function.__code__.co_firstlineno != code.co_firstlineno:
        return False
    try:
        function.__code__ = code
    except ValueError:                          # it uses other names of the functions around it
        return False
    return True


def find_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == name)


def unwrap(found: Any) -> Any:
    """The function behind what decorators made of it."""
    for name in ("fget", "__func__", "func", "__wrapped__"):
        found = getattr(found, name, None) or found
    return found

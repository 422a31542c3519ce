"""The mutants of a room: what mutmut's operators, and a few more, make of its code; without the senseless ones."""
from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, WhitespaceInclusivePositionProvider
from mutmut.mutation.mutators import (
    mutation_operators,
    operator_arg_removal,
    operator_assignment,
    operator_if_exp,
    operator_string,
)

TOP = Path(__file__).resolve().parents[3]
LOGS = ("log", "logs")                      # a call of info(), error() and so on of these only changes what is logged


@dataclass(frozen=True)
class Mutant:
    """One change of a room."""

    room: str                       # like "schedule/plan"
    first: int                      # the first line of the room's file that it changes, from 1
    last: int                       # the last one
    lines: tuple[str, ...]          # what stands there instead
    before: tuple[str, ...]         # the lines that go, stripped
    after: tuple[str, ...]          # those that come
    number: int = 0                 # of the mutants of this room that have the same lines, from top to bottom

    @property
    def id(self) -> str:
        return f"{self.room}:{digest(self.room, self.number, self.before, self.after)[:8]}"

    @property
    def diff(self) -> list[str]:
        return [*(f"- {line}" for line in self.before), *(f"+ {line}" for line in self.after)]


def digest(*facts: object) -> str:
    return hashlib.sha1(repr(facts).encode()).hexdigest()


def leave_out(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What is done for its effect alone, and not done: a call, a yield, a raise, a del."""
    if not (isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString)):     # that is a docstring
        yield cst.Pass()


# mutmut's, and: each branch of `if` and of the conditions of comprehensions; what is left out.
OPERATORS = [*mutation_operators, (cst.If, operator_if_exp), (cst.CompIf, operator_if_exp),
             *((kind, leave_out) for kind in (cst.Expr, cst.Raise, cst.Del))]


def is_words(node: cst.CSTNode) -> bool:
    """Whether it is a text for people: one with a blank in it."""
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    if isinstance(node, cst.ConcatenatedString):
        return is_words(node.left) or is_words(node.right)
    return isinstance(node, cst.SimpleString) and " " in node.value


def get_name(node: cst.CSTNode) -> str:
    """The last word of a name: `b` of a.b."""
    found = node.attr if isinstance(node, cst.Attribute) else node
    return found.value if isinstance(found, cst.Name) else ""


def is_log_call(node: cst.CSTNode) -> bool:
    return (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and get_name(node.func.value) in LOGS)


def is_senseless(node: cst.CSTNode) -> bool:
    """Whether nothing in it is changed: see the docstring of the program."""
    if isinstance(node, (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator)):
        return True
    if is_words(node) or is_log_call(node):
        return True
    if isinstance(node, cst.If):
        return get_name(node.test) == "TYPE_CHECKING"
    if isinstance(node, cst.Assign):
        names = [get_name(target.target) for target in node.targets]
        return names[0].startswith("__") or (is_words(node.value) and names[0].isupper())
    if isinstance(node, cst.FunctionDef):
        return node.name.value.startswith("describe_") or node.name.value in ("__repr__", "__str__")
    if isinstance(node, cst.AugAssign):
        return is_words(node.value)
    if isinstance(node, cst.Arg):
        return get_name(node.keyword or node) in ("hint", "examples")
    if isinstance(node, cst.DictElement):                   # of a schema, for the OpenAPI document
        return isinstance(node.key, cst.SimpleString) and node.key.evaluated_value in ("title", "examples")
    if isinstance(node, cst.IfExp):                         # it only chooses the words
        branches = (node.body, node.orelse)
        return any(map(is_words, branches)) and all(isinstance(branch, cst.BaseString) for branch in branches)
    return isinstance(node, cst.Expr) and (isinstance(node.value, cst.BaseString) or is_log_call(node.value))


def is_falsy(node: cst.CSTNode | None) -> bool:
    """Whether it is False, "" or an empty tuple, list or dict."""
    if isinstance(node, (cst.Tuple, cst.List, cst.Dict)):
        return not node.elements
    return not node.evaluated_value if isinstance(node, cst.SimpleString) else get_name(node or cst.Pass()) == "False"


def list_variants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What stands in the place of a node, one after another."""
    for kind, operator in OPERATORS:
        if not isinstance(node, kind):
            continue
        variants = list(operator(node))
        if operator is operator_string:
            variants = variants[:1]                         # other cases of its letters are no other fault
        if operator is operator_arg_removal:
            variants = [new for new in variants if is_default_taken(node, new)]
        if operator is operator_assignment and (is_falsy(node.value) or (
                isinstance(node, cst.AnnAssign) and get_name(node.value or node) == "None")):
            variants = []                                   # nothing is told from nothing
        if isinstance(node, cst.BinaryOperation) and (is_words(node.left) or is_words(node.right)):
            variants = []
        yield from variants


def is_default_taken(call: cst.Call, new: cst.CSTNode) -> bool:
    """Whether a call lacks an argument that it gave by its name, and that is not only words.

    Without another one it would mostly fail at once, in any test that comes there.
    """
    missing = next(arg for arg in call.args if arg not in getattr(new, "args", ()))
    return missing.keyword is not None and not is_senseless(missing) and not is_senseless(missing.value)


class Collector(cst.CSTVisitor):
    """Collects (where, what stands there instead) of a module."""

    METADATA_DEPENDENCIES = (WhitespaceInclusivePositionProvider,)

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self.module = module
        self.found: list[tuple[CodeRange, str]] = []
        self.skipped: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if node in self.skipped or is_senseless(node):
            return False
        if isinstance(node, cst.Call) and get_name(node.func) == "NexusError":
            self.skipped.update(node.args[1:])              # the kind of an error counts, its words do not
        for new in list_variants(node):
            # Of a statement with a body only the condition is written anew: the rest would lose its indentation.
            old, new = (node.test, new.test) if isinstance(node, cst.If) and isinstance(new, cst.If) else (node, new)
            where = self.get_metadata(WhitespaceInclusivePositionProvider, old, None)
            if where:
                self.found.append((where, self.module.code_for_node(new)))
        return True


def list_mutants(room: str) -> list[Mutant]:
    """All mutants of a room, from top to bottom."""
    source = (TOP / f"src/{room}.py").read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    collector = Collector(wrapper.module)
    wrapper.visit(collector)
    lines = source.split("\n")
    made: dict[Mutant, None] = {}
    numbers: dict[tuple[object, object], int] = {}
    for where, text in sorted(collector.found, key=lambda row: (row[0].start.line, row[0].start.column)):
        mutant = make_mutant(room, lines, where, text)
        if mutant and mutant not in made:
            made[mutant] = None
    mutants = []
    for mutant in made:
        key = mutant.before, mutant.after
        numbers[key] = numbers.get(key, -1) + 1
        mutants.append(Mutant(**{**vars(mutant), "number": numbers[key]}))
    return mutants


def make_mutant(room: str, lines: Sequence[str], where: CodeRange, text: str) -> Mutant | None:
    """The mutant that has `text` where a node stood; None if nothing changes."""
    first, last = where.start.line, min(where.end.line, len(lines))
    end = lines[last - 1][where.end.column:] if where.end.line <= len(lines) else ""
    new = (lines[first - 1][:where.start.column] + text + end).split("\n")
    old = list(lines[first - 1:last])
    while old and new and old[0] == new[0]:
        del old[0], new[0]
        first += 1
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
        last -= 1
    if not old or not "".join(new).strip():
        return None
    after = tuple(line.strip() for line in new if line.strip())
    return Mutant(room, first, last, tuple(new), tuple(line.strip() for line in old), after)


def choose(rooms: Iterable[str], seed: int, count: int) -> list[Mutant]:
    """A sample of the mutants of some rooms: no line has a second one before each has had its first.

    It follows from the seed and the lines: a line that is edited changes its own mutants only.
    """
    found = []
    for room in rooms:
        mutants = sorted(list_mutants(room), key=lambda mutant: digest(seed, mutant.id))
        turns: dict[int, int] = {}
        for mutant in mutants:
            turns[mutant.first] = turn = turns.get(mutant.first, -1) + 1
            found.append((turn, digest(seed, mutant.id), mutant))
    chosen: list[Mutant] = []
    for _, _, mutant in sorted(found, key=lambda row: row[:2]):
        if len(chosen) < count and is_other_code(mutant):
            chosen.append(mutant)
    return chosen


def is_other_code(mutant: Mutant) -> bool:
    """Whether a mutant can be compiled, and differs in more than its looks."""
    lines, before = read_room(mutant.room)
    try:
        tree = ast.parse("\n".join([*lines[:mutant.first - 1], *mutant.lines, *lines[mutant.last:]]))
        compile(tree, mutant.room, "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != before


@functools.cache
def read_room(room: str) -> tuple[list[str], str]:
    """The lines of a room, and its tree as a text."""
    source = (TOP / f"src/{room}.py").read_text(encoding="utf-8")
    return source.split("\n"), ast.dump(ast.parse(source))

"""docs/promises.md: each promise stands where the table says, and has a judge that is there."""

import ast
import functools
import re

import pytest

import build

TEXT = (build.TOP / "docs/promises.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!promise \|)(\S.*?) \| (.*?) \| (.*?) \|$", TEXT, re.MULTILINE)


@functools.lru_cache(None)
def list_functions(path):
    tree = ast.parse((build.TOP / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@functools.lru_cache(None)
def read_document(name):
    path = build.TOP / f"docs/{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def find_faults(places, judges):
    """What a row names that is not there."""
    for place in places.split("; "):
        rule = re.fullmatch(r"rule (\d+)", place)
        name, _, heading = ("design", "", "What is always true") if rule else place.partition(", ")
        text = read_document(name)
        if not re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE) or (rule and f"\n{rule[1]}. **" not in text):
            yield place
    for judge in judges.split(", "):
        found = re.fullmatch(r"`((?:unit|sim|e2e)/[\w/]+\.py)::(\w+)`", judge)
        if not found or not (build.TOP / "tests" / found[1]).is_file() or found[2] not in list_functions(found[1]):
            paths = sorted(path.relative_to(build.TOP / "tests").as_posix() for path in (build.TOP / "tests").rglob("*.py"))
            yield judge, [path for path in paths if found and found[2] in list_functions(path)]


def test_each_line_of_the_table_is_a_row():
    lines = [line for line in TEXT.splitlines() if line.startswith("|") and not re.match(r"\|(---| promise )", line)]
    assert len(lines) == len(ROWS) > 250 and len({promise for promise, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("section", re.findall(r"^## (.*)$", TEXT, re.MULTILINE))
def test_each_promise_and_its_judges_are_there(section):
    rows = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    faults = [(row[0], fault) for row in ROWS if f"| {row[0]} |" in rows for fault in find_faults(row[1], row[2])]
    assert faults == [], "it has another name or place now: see where it is, and that it still judges this"


@pytest.mark.parametrize("name", ["guide", "operations", "http-api", "security"])
def test_each_section_of_a_document_has_a_row(name):
    """The first heading is the document's own: what stands below it may have none."""
    text = re.sub(r"^```.*?^```$", "", read_document(name), flags=re.MULTILINE | re.DOTALL)
    places = {place for _, places, _ in ROWS for place in places.split("; ")}
    assert [heading for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)[1:] if f"{name}, {heading}" not in places] == []

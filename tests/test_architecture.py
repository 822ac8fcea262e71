"""Files import one another in one direction; import-linter sees rooms only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "infoflow_lens"
ROOMS = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file())


def module_name(path):
    """The dotted name of a file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source, modules):
    """The modules that a source imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found |= {inner if inner in modules else node.module} & modules
    return found


def circles(graph):
    """Sets of nodes that reach one another, by walking from each."""

    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {node: reached(node) for node in graph}
    return {
        frozenset(n for n in graph if n in reach[node] and node in reach[n])
        for node in graph
        if node in reach[node]
    }


@pytest.fixture(scope="module")
def graph():
    """Which file of the package imports which other one, inside functions and for types, too."""
    paths = [*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))]
    files = {module_name(path): path for path in sorted(paths)}
    return {
        name: imports(path.read_text(encoding="utf-8"), set(files)) - {name}
        for name, path in files.items()
    }


def test_no_files_import_one_another_in_a_circle(graph):
    assert len(graph) > 200
    assert "infoflow_lens.hooks.probe" in graph
    assert [sorted(names) for names in circles(graph)] == []


def test_circles_are_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert circles(graph) == {frozenset({"b", "c"}), frozenset({"e"})}

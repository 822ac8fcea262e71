"""Inside a room files import one another in one direction; import-linter sees rooms only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "infoflow_lens"
ROOMS = sorted(p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file())
# circles that are still there, by their files: they may shrink and go, and none may come
KNOWN = {
    "flows": [("result", "view")],
    "probing": [
        (
            "checkpoint", "config", "folder", "heads", "page", "part", "per_head", "picture",
            "registry", "result", "spread",
        )
    ],
}  # fmt: skip


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


def graph_of(room):
    """Which file of a room imports which other one."""
    files = {module_name(path): path for path in sorted((ROOT / room).rglob("*.py"))}
    return {
        name: imports(path.read_text(encoding="utf-8"), set(files)) - {name}
        for name, path in files.items()
    }


@pytest.mark.parametrize("room", ROOMS)
def test_no_circle_of_imports_but_the_known_ones(room):
    known = [set(files) for files in KNOWN.get(room, ())]
    for found in circles(graph_of(room)):
        names = {name.removeprefix(f"infoflow_lens.{room}").lstrip(".") or room for name in found}
        assert any(names <= files for files in known), sorted(names)


def test_known_circles_are_still_there():
    """A circle that is gone leaves the list."""
    for room, listed in KNOWN.items():
        found = circles(graph_of(room))
        names = [{n.removeprefix(f"infoflow_lens.{room}.") for n in circle} for circle in found]
        for files in listed:
            assert any(circle & set(files) for circle in names), (room, files)


def test_circles_are_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}, "e": {"e"}}
    assert circles(graph) == {frozenset({"b", "c"}), frozenset({"e"})}

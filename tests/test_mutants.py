"""The mutants of a small package; ``python -m tests.mutants`` tries hundreds of our own."""

import ast
import json
import sys

import pytest

from tests.mutants import mutations, python_files, rooms_of
from tests.processes import printed_by

SOURCE = '''
"""A module without a fault."""
from __future__ import annotations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def clipped(values: Sequence[int] | None, high: int = 9, text: str = "a word") -> list[int]:
    """Values of at most 9."""
    if values is None:
        raise ValueError("no" + f"values {1 + 1}")
    found = []
    for value in values:
        found.append(value if value <= high else high)
    return found


def unused(x):
    return x
'''
TEST = """
from pkg.clip import clipped


def test_clipped():
    assert clipped([8, 9, 10]) == [8, 9, 9]
"""


def test_a_mutation_changes_one_line_of_what_code_does():
    whole = ast.unparse(ast.parse(SOURCE)).splitlines()
    seen = set()
    for number in range(len(mutations(ast.parse(SOURCE)))):
        tree = ast.parse(SOURCE)
        mutations(tree)[number].apply()
        ast.fix_missing_locations(tree)
        compile(tree, "changed", "exec")
        changed = ast.unparse(tree).splitlines()
        ((old, new),) = [pair for pair in zip(whole, changed, strict=True) if pair[0] != pair[1]]
        seen.add((old.strip(), new.strip()))
    signature = "def clipped(values: Sequence[int] | None, high: int={}, text: str='a word')"
    append = "found.append({})"
    assert seen == {
        (f"{signature.format(9)} -> list[int]:", f"{signature.format(10)} -> list[int]:"),
        ("if values is None:", "if values is not None:"),
        ("raise ValueError('no' + f'values {1 + 1}')", "pass"),
        (append.format("value if value <= high else high"), "pass"),
        *(
            (append.format("value if value <= high else high"), append.format(changed))
            for changed in (
                "value if value < high else high",
                "value if value > high else high",
                "value if not value <= high else high",
            )
        ),
        ("return found", "return None"),
        ("return x", "return None"),
    }


def test_every_module_is_in_one_room():
    rooms = [path for room in rooms_of("infoflow_lens") for path in python_files(room)]
    assert len(set(rooms)) == len(rooms)
    assert {*python_files("infoflow_lens")} - {*rooms} == {"infoflow_lens/__init__.py"}
    assert {*python_files("hooks"), *python_files("tasks")} < {*rooms}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mutants are forked")
def test_tests_decide_on_each_mutant_once(tmp_path):
    files = {"pkg/__init__.py": "", "pkg/clip.py": SOURCE, "checks/test_clip.py": TEST}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [
        "-m",
        "tests.mutants",
        "--out",
        "out",
        "--package",
        "pkg",
        "--tests",
        "checks",
        "--n",
    ]
    found = []
    for n in (3, 100):
        printed_by(*command, str(n), folder=tmp_path)
        rows = (tmp_path / "out/mutants.jsonl").read_text().splitlines()
        found.append([json.loads(row) for row in rows])
    first, rows = found
    assert len(first) == 3
    assert rows[:3] == first
    assert [row["number"] for row in rows] == list(range(len(rows)))
    lines = SOURCE.splitlines()
    outcomes = {lines[row["line"] - 1].strip(): row["outcome"] for row in rows}
    assert outcomes["return found"] == "killed"
    assert outcomes["return x"] == "survived"
    assert {name: (tmp_path / name).read_text() for name in files} == files
    survivors = (tmp_path / "out/survivors.txt").read_text().splitlines()
    assert len(survivors) == sum(row["outcome"] == "survived" for row in rows)

"""Two houses: the library, and the laboratory that stands on it."""

import ast
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoflow_lens.cli import app
from tests.processes import printed_by

ROOT = Path(__file__).parent.parent
LIBRARY = [
    path
    for room in ("infoflow_lens", "hooks", "tasks")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.is_relative_to(ROOT / "infoflow_lens" / "studies")
]


def imported(path):
    """The modules that a file imports, also inside functions and for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def test_nothing_of_the_library_imports_a_study():
    assert len(LIBRARY) > 100
    found = [p for p in LIBRARY if any(m.startswith("infoflow_lens.studies") for m in imported(p))]
    assert found == []


@pytest.mark.parametrize("command", ["demo", "study", "train-language-model"])
def test_the_command_line_finds_what_studies_bring(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_the_library_works_without_studies(tmp_path):
    """Every public name loads, and the command line offers what the library has."""
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "sys.modules['infoflow_lens.studies'] = None\n"
        "import infoflow_lens\n"
        "from infoflow_lens.cli import app\n"
        "import typer\n"
        "for name in infoflow_lens.__all__: getattr(infoflow_lens, name)\n"
        "commands = typer.main.get_command(app).commands\n"
        "print('probe' in commands, 'survey' in commands, 'study' in commands)\n"
    )
    said = printed_by(tmp_path / "script.py", folder=ROOT)
    assert said.split() == ["True", "True", "False"]

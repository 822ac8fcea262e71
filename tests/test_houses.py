"""Two houses: the library, and the laboratory that stands on it; `make lint` holds its imports."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoflow_lens.cli import app
from tests.processes import printed_by

ROOT = Path(__file__).parent.parent


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

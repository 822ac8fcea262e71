"""Every script in examples/ and the README's example run alone."""

import re
from pathlib import Path

import pytest

from tests.processes import printed_by

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    assert printed_by(path, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def test_the_readme_example_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    path = tmp_path / "readme.py"
    path.write_text(script)
    assert "second_moment" in printed_by(path, folder=tmp_path)

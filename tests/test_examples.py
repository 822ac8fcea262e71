"""Every script in examples/ and the README's example run alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path, tmp_path):
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},  # what needs a network must do without
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    assert run(path, tmp_path)
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def test_the_readme_example_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    path = tmp_path / "readme.py"
    path.write_text(script)
    assert "second_moment" in run(path, tmp_path)

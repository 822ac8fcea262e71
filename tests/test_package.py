"""What is installed: every package, the type marker, the public names, and no more."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import infoflow_lens

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for folder in ("infoflow_lens", "hooks", "tasks"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(source / "dist")]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module(wheel):
    names = set(wheel.namelist())
    rooms = {"hooks": "infoflow_lens/hooks", "tasks": "infoflow_lens/tasks"}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "infoflow_lens").rglob("*.py")} | {
        f"{inside}/{path.relative_to(ROOT / room)}"
        for room, inside in rooms.items()
        for path in (ROOT / room).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert "infoflow_lens/py.typed" in names
    assert "infoflow_lens/report/templates/report.html.j2" in names
    shipped = ROOT / "infoflow_lens" / "models" / "shipped"
    for path in shipped.glob("*/*.*"):
        if path.suffix != ".pyc":
            assert str(path.relative_to(ROOT)) in names


def test_every_public_name_is_there_and_documented():
    for name in infoflow_lens.__all__:
        value = getattr(infoflow_lens, name)
        assert value.__doc__, name
    assert set(dir(infoflow_lens)) == set(infoflow_lens.__all__)
    with pytest.raises(AttributeError, match="no attribute 'probe'"):
        infoflow_lens.probe  # noqa: B018


def test_public_names_are_those_that_type_checkers_see():
    """The lazy table and the imports for type checkers must not drift apart."""
    source = Path(infoflow_lens.__file__).read_text()
    typed = {line.split(" as ")[1] for line in source.splitlines() if line.startswith("    from ")}
    assert typed == set(infoflow_lens.__all__)


def test_importing_the_package_loads_nothing_heavy():
    script = (
        "import sys, infoflow_lens\n"
        "heavy = ('torch', 'transformer_lens', 'datasets', 'pandas')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_probes_and_theory_do_without_transformer_lens():
    script = (
        "import sys, infoflow_lens.hooks, infoflow_lens.theory, infoflow_lens.tasks\n"
        "print('transformer_lens' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"

"""Which tests a change needs, on a small package; `make check` asks it of our own."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.check import Table, changed_statements, choose, whole_files
from tests.processes import printed_by

SOURCE = '''"""A module."""

LIMIT = 9


def clip(value):
    """At most the limit."""
    if value > LIMIT:
        return LIMIT
    return value


def double(
    value,
):
    found = [
        value,
        value,
    ]
    return sum(found)
'''


TESTS_OF_CLIP = """
from pkg.clip import clip


def test_low():
    assert clip(3) == 3


def test_high():
    assert clip(30) == 9
"""


@pytest.mark.parametrize(
    ("old", "new", "inside", "outside"),
    [
        ("return LIMIT\n", "return LIMIT + 0\n", {9}, set()),
        ("value > LIMIT", "value >= LIMIT", {8}, set()),
        ("LIMIT = 9", "LIMIT = 8", set(), {3}),
        ("        value,\n        value,\n", "        value,\n        2,\n", {16}, set()),
        ("    value,\n):", "    value=1,\n):", {16}, {13}),  # the head of a function
        ('"""At most the limit."""', '"""The value, at most the limit."""', set(), set()),
        ("    if value", "    value = abs(value)\n    if value", {8}, set()),  # a new statement
    ],
)
def test_a_change_is_of_the_statements_that_hold_it(old, new, inside, outside):
    assert SOURCE.count(old) == 1
    assert changed_statements(SOURCE, SOURCE.replace(old, new)) == (inside, outside)


def test_nothing_has_changed_in_what_is_equal():
    assert changed_statements(SOURCE, SOURCE) == (set(), set())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A package whose tests were recorded."""
    tmp_path = tmp_path_factory.mktemp("package")
    for place, text in {
        "pkg/__init__.py": "",
        "pkg/clip.py": SOURCE,
        "tests/test_clip.py": TESTS_OF_CLIP,
        "tests/test_double.py": "import pytest\n\n\n@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_double(x):\n    from pkg.clip import double\n\n    assert double(x) == 2 * x\n",
    }.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(text)
    root = Path(__file__).parent.parent
    (tmp_path / "script.py").write_text(
        f"import sys\nsys.path[:0] = [{str(root)!r}, '.']\nfrom pathlib import Path\n"
        "from tests.check import Table\n"
        "table = Table(Path('executed'), 'pkg')\n"
        "print(list(table.record(table.stale(), jobs=1)), table.stale())\n"
    )
    assert printed_by(tmp_path / "script.py", folder=tmp_path).endswith("[] []\n")
    return tmp_path


@pytest.fixture
def project(recorded, tmp_path, monkeypatch):
    """A copy of it, to be changed."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Table(Path("executed"), "pkg")


@pytest.mark.skipif(sys.platform != "linux", reason="forks what has loaded libraries")
def test_a_change_needs_the_tests_that_execute_it(project):
    path = Path("pkg/clip.py")

    def needed(old, new):
        path.write_text(SOURCE.replace(old, new))
        return [name.partition("::")[2] for name in project.tests_of(["pkg/clip.py"])]

    assert needed("return LIMIT\n", "return LIMIT + 0\n") == ["test_high"]
    assert sorted(needed("value > LIMIT", "value >= LIMIT")) == ["test_high", "test_low"]
    assert sorted(needed("sum(found)", "sum(found) + 0")) == ["test_double[1]", "test_double[2]"]
    assert len(needed("LIMIT = 9", "LIMIT = 8")) == 4  # whoever executes the module
    assert needed("A module", "The module") == []


@pytest.mark.skipif(sys.platform != "linux", reason="forks what has loaded libraries")
def test_changed_files_of_tests_run_whole_and_are_recorded_anew(project):
    Path("tests/test_clip.py").write_text("def test_nothing():\n    pass\n")
    table = Table(project.folder, "pkg")
    assert table.stale() == ["tests/test_clip.py"]
    assert whole_files(["pkg/clip.py"], table.stale()) == ["tests/test_clip.py"]


def test_files_that_are_no_modules_need_the_tests_of_their_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for room in ("report", "docs"):
        Path("tests", room).mkdir(parents=True)
    assert whole_files(["infoflow_lens/report/assets/flow/data.js"], []) == ["tests/report"]
    assert whole_files(["README.md", "docs/theory.md"], ["tests/gone.py"]) == ["tests/docs"]


def test_tests_that_do_not_fit_are_left_out_by_name():
    assert choose({"a": 1.0, "b": 5.0, "c": 2.0}, 3) == (["a", "c"], ["b"])

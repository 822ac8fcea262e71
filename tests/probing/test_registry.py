"""Parts by name: those of the package, and those that other packages add."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, save_model
from infoflow_lens.cli import app
from infoflow_lens.probing.config import ProbingConfig, part_names
from infoflow_lens.probing.part import Part, load_part
from infoflow_lens.studies.constructions import build_construction

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with entry points, as pip would."""

    def install(name, **entries):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {value}" for entry, value in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[infoflow_lens.probes]", *lines]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.syspath_prepend(str(EXAMPLES))

    return install


def run_example(tmp_path):
    arguments = ["--data", "in_context_qa", "--n", "40", "--ranks", "1", "--quiet"]
    arguments += ["--probes", "previous", "--out", str(tmp_path / "out")]
    return CliRunner().invoke(app, ["probe", str(tmp_path / "model"), *arguments])


def test_a_probe_of_other_code_is_another_run(installed, tmp_path, monkeypatch):
    """Who develops a probe in one folder got the numbers of the code before."""
    source = (EXAMPLES / "probe_of_your_own.py").read_text()
    installed("yours", previous="own_probe:PreviousToken")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # both files may be of one second
    model, _ = build_construction("in_context_qa")
    save_model(model, tmp_path / "model")
    for old, new, expected in (
        ("first=1", "first=1", ""),
        ("def compute(self):", "def compute(self):  # a remark", ""),
        ("first=1", "first=2", "the code of your own probes (previous) changed"),
    ):
        assert old in source
        (tmp_path / "own_probe.py").write_text(source.replace(old, new))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "own_probe", raising=False)
        done = run_example(tmp_path)
        assert expected in done.output
        assert bool(done.exit_code) == bool(expected), done.output
    config = ProbingConfig(model="gpt2", data="x.txt", probes=("previous", "positions"))
    # a finished run is repeated without the model, as long as these files are the same
    assert config.sources()["probe previous"] == tmp_path / "own_probe.py"


def test_every_part_of_ours_is_there():
    assert set(part_names()) == {
        "labels", "influence", "positions", "recovery", "routes", "top_k",
    }  # fmt: skip
    for name in part_names():
        assert isinstance(load_part(name), Part)


def test_the_example_takes_part_in_the_command(installed, tmp_path):
    """At most 30 lines, and it stands in the terminal's help, the tables and the report."""
    assert len((EXAMPLES / "probe_of_your_own.py").read_text().splitlines()) <= 30
    installed("yours", previous="probe_of_your_own:PreviousToken")
    assert part_names()[-1] == "previous"
    model, _ = build_construction("in_context_qa")
    save_model(model, tmp_path / "model")
    out = tmp_path / "out"
    arguments = ["--data", "in_context_qa", "--n", "40", "--ranks", "1", "--quiet"]
    arguments += ["--probes", "positions,previous", "--out", str(out)]
    done = CliRunner().invoke(app, ["probe", str(tmp_path / "model"), *arguments])
    assert done.exit_code == 0, done.output
    table = (out / "previous.csv").read_text().splitlines()
    assert table[0] == "layer,head,value"
    assert len(table) == 3
    assert "Attention to the previous position" in (out / "report.html").read_text()


def test_a_broken_entry_point_hurts_nobody_who_does_not_ask(installed):
    installed("broken", missing="no_such_module:Part", number="math:pi")
    assert isinstance(load_part("positions"), Part)
    with pytest.raises(InfoFlowError, match=r"'missing' of .* cannot be imported"):
        load_part("missing")
    with pytest.raises(InfoFlowError, match=r"expected a subclass of infoflow_lens\.probing\.part"):
        load_part("number")


def test_taken_names_are_refused(installed):
    installed("thief", recovery="probe_of_your_own:PreviousToken")
    with pytest.raises(InfoFlowError, match=r"'recovery' of infoflow_lens\.probes .* is taken"):
        part_names()


def test_unknown_names_come_with_the_nearest(installed):
    installed("yours", previous="probe_of_your_own:PreviousToken")
    with pytest.raises(InfoFlowError, match="did you mean 'previous'"):
        ProbingConfig("model", "data", probes=("previos",))
    with pytest.raises(InfoFlowError, match="did you mean 'influence'"):
        load_part("influenc")


def test_settings_and_names_load_no_model_library():
    script = (
        "import sys, infoflow_lens.probing.config\n"
        "print([m for m in ('torch', 'transformer_lens') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"

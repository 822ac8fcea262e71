"""Every command that takes --out leaves what others have put into the folder as it was."""

import os

import pytest
import typer
from typer.testing import CliRunner

from infoflow_lens.cli import app
from infoflow_lens.experiments import demo
from infoflow_lens.experiments.language_model import training
from infoflow_lens.experiments.language_model.config import preset
from infoflow_lens.runs.folder import MANIFEST, PRIVATE
from tests.conftest import some_of
from tests.experiments.language_model.test_training import CONFIG, CORPUS
from tests.reference import zoo

pytestmark = pytest.mark.filterwarnings("ignore::infoflow_lens.foundation.errors.InfoFlowWarning")


def of_config():
    """The options of a language model that is trained in a moment."""
    of_preset = vars(preset("stdlib-2l"))
    changed = {n: v for n, v in vars(CONFIG).items() if v != of_preset[n]}
    return [word for n, v in changed.items() for word in (f"--{n.replace('_', '-')}", str(v))]


ARGUMENTS = {
    "probe": [
        "MODEL",
        "--data",
        "repeated",
        "--shard",
        "4",
        "--probes",
        "positions",
        "--n",
        "6",
        "--max-length",
        "8",
        "--quiet",
    ],
    "survey": ["MODEL", "--data", "repeated", "--n", "6", "--window", "8", "--quiet"],
    "demo": ["--quiet"],
    "experiment": ["specific_position", "--preset", "smoke", "--quiet", "--resume"],
    "study": ["top_k", "--model", "MODEL", "--preset", "smoke", "--quiet", "--resume"],
    "train-language-model": ["stdlib-2l", *of_config(), "--quiet"],
    "certify": ["DATA", "--quiet"],
    "estimate": ["kth_largest", "--heads", "1", "--tokens", "8"],
    "flow": ["MODEL", "a b a b", "--quiet"],
}
DOCUMENTS = {
    "certify": "certificate.json",
    "estimate": "witness.json",
    "flow": "flow.html",
}
# What others may have in a folder: downloads and transfers, notes beside files of the run, other
# runs, and links.
THEIRS = (
    ".movie.mkv.part", ".rsync.part/half", "inputs/notes.txt", "positions/mine.json",
    "runs/mine.json", "training/notes", "checkpoints/notes", "model/notes", ".lock", "data.csv",
    f"nested/{PRIVATE}/scratch/half", f"nested/{MANIFEST}", "nested/record.json",
)  # fmt: skip


def with_out():
    """The names of the commands that take --out."""
    commands = typer.main.get_command(app).commands.items()
    return {n for n, c in commands if any("--out" in option.opts for option in c.params)}


def test_the_table_names_every_command_with_a_folder():
    assert set(ARGUMENTS) == with_out()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return zoo.save("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def small(monkeypatch):
    """Sizes at which training takes a moment."""
    sizes = {"n_tokens": 4, "d_model": 8, "d_mlp": 8, "half_epochs": 1, "epochs": 1, "n_train": 40,
             "n_shown": 2, "n_validation": 10, "n_recovery": 20, "n_influence": 4}  # fmt: skip
    monkeypatch.setattr(training, "read_corpus", lambda: CORPUS)
    usual = demo.DemoConfig
    monkeypatch.setattr(demo, "DemoConfig", lambda seed=0: usual(seed=seed, **sizes))


def theirs(out):
    """Everything in a folder, with what links lead to."""
    return {p: os.readlink(p) if p.is_symlink() else p.read_bytes() for p in out.rglob("*")
            if p.is_symlink() or p.is_file()}  # fmt: skip


@pytest.mark.parametrize("command", some_of(sorted(ARGUMENTS), "probe", "study"))
def test_files_links_and_runs_of_others_stay_as_they_are(command, model, small, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for name in THEIRS:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "x.json").write_text("theirs")
    (out / "data").symlink_to(elsewhere)
    before = theirs(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(f'{{"x": ["{a}", "{b}", "?"], "y": "{a}"}}\n' for a in "ab" for b in "cd")
    )
    words = {"MODEL": str(model), "DATA": str(data)}
    arguments = [words.get(word, word) for word in ARGUMENTS[command]]
    place = out / DOCUMENTS.get(command, "")
    for _ in range(2):  # a second run goes on, or makes all of it again
        result = CliRunner().invoke(app, [command, *arguments, "--out", str(place)])
        assert result.exit_code == 0, result.output
        after = theirs(tmp_path)
        assert {path: after.get(path) for path in before} == before
        assert len(after) > len(before) + 1  # and it has written its own


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize(
    ("command", "name"),
    [("probe", "positions"), ("probe", "inputs"), ("probe", "report.html"), ("demo", "training"),
     ("demo", "summary.json"), ("experiment", "runs"), ("experiment", MANIFEST),
     ("probe", PRIVATE), ("certify", "certificate.json"), ("estimate", "witness.json"),
     ("flow", "flow.html"),
     ("demo", "model")],
)  # fmt: skip
def test_links_in_the_places_of_the_runs_own_files_are_refused(
    command, name, model, small, tmp_path
):
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    if "." in name.lstrip("."):
        victim.write_text("theirs")
    else:
        victim.mkdir()
        (victim / "000000.json").write_text("theirs")
    (out / name).symlink_to(victim)
    before = theirs(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"x": ["a", "?"], "y": "a"}\n{"x": ["b", "?"], "y": "b"}\n')
    words = {"MODEL": str(model), "DATA": str(data)}
    arguments = [words.get(word, word) for word in ARGUMENTS[command]]
    place = out / name if command in DOCUMENTS else out
    result = CliRunner().invoke(app, [command, *arguments, "--out", str(place)])
    assert result.exit_code == 2, result.output
    assert name in result.stderr
    after = theirs(tmp_path)
    assert {path: after.get(path) for path in before} == before

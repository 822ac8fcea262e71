"""A finished run that is started again: the answer is in the folder, and nothing is loaded."""

import json
import shutil
import subprocess
import sys

import pytest

from infoflow_lens.foundation import packages
from infoflow_lens.foundation.files import write_signed
from infoflow_lens.runs.folder import FINISHED, RunFolder, read_output, write_output

ASKED = {"model": "a model", "threshold": 0.05}
SAID = {"sentences": ["It holds."], "title": "", "rows": [["max_position", *"1234"]]}


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run, and what it has read."""
    sources = {"model": tmp_path / "model", "data": tmp_path / "texts.txt"}
    (sources["model"] / "inner").mkdir(parents=True)
    (sources["model"] / "inner" / "weights").write_bytes(b"weights")
    sources["data"].write_text("a text")
    out = tmp_path / "out"
    with RunFolder.open(out, "a run") as folder:
        folder.claim({"settings": 1})
        temporary = folder.temporary(out / "numbers.csv")
        temporary.write_text("1,2\n")
        folder.replace(temporary, out / "numbers.csv")
        write_output(folder, ASKED, sources, SAID)
    return out, sources


def test_the_same_question_on_the_same_files_has_its_answer(run, tmp_path):
    out, sources = run
    assert read_output(out, ASKED, sources) == SAID
    moved = shutil.copytree(out, tmp_path / "elsewhere")
    copied = {
        "model": shutil.copytree(sources["model"], tmp_path / "copy"),
        "data": sources["data"],
    }
    assert read_output(moved, ASKED, copied) == SAID


@pytest.mark.parametrize(
    "change",
    [
        lambda out, model, data: data.write_text("b text"),
        lambda out, model, data: data.unlink(),
        lambda out, model, data: (model / "inner" / "weights").write_bytes(b"weighty"),
        lambda out, model, data: (model / "more").write_bytes(b""),
        lambda out, model, data: (out / "numbers.csv").write_text("1,3\n"),
        lambda out, model, data: (out / "numbers.csv").unlink(),
        lambda out, model, data: (out / "manifest.jsonl").write_text("{}\n"),
        lambda out, model, data: (out / FINISHED).write_text("{}"),
        lambda out, model, data: (out / FINISHED).write_text(
            (out / FINISHED).read_text().replace("It holds", "It fails")
        ),
    ],
)
def test_what_has_changed_leads_to_an_ordinary_start(run, change):
    out, sources = run
    change(out, sources["model"], sources["data"])
    assert read_output(out, ASKED, sources) is None


def test_what_another_command_would_have_written_must_be_there(run):
    out, sources = run
    assert read_output(out, ASKED, sources, ["numbers.csv"]) == SAID
    assert read_output(out, ASKED, sources, ["heads.csv"]) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"said": {}},
        {"said": {**SAID, "sentences": 3}},
        {"said": {**SAID, "rows": [["max_position"]]}},
        {"said": {**SAID, "sentences": ["\x1b[31mred"]}},
        {"sources": []},
    ],
)
def test_what_no_run_writes_is_never_printed(run, changed):
    """Who gives a folder away can sign its files anew."""
    out, sources = run
    values = json.loads((out / FINISHED).read_text())
    schema = values.pop("schema")
    del values["digest"]
    with RunFolder.open(out, "a run"):
        write_signed(out / FINISHED, schema, {**values, **changed})
    assert read_output(out, ASKED, sources) is None


def test_other_settings_and_versions_lead_to_an_ordinary_start(run, monkeypatch):
    out, sources = run
    assert read_output(out, {**ASKED, "threshold": 0.1}, sources) is None
    now = {**packages.package_versions(), "torch": "1.0"}
    monkeypatch.setattr("infoflow_lens.runs.folder.package_versions", lambda: now)
    assert read_output(out, ASKED, sources) is None


def test_names_whose_files_are_not_known_are_never_finished(tmp_path):
    with RunFolder.open(tmp_path / "out", "a run") as folder:
        folder.claim({"settings": 1})
        write_output(folder, ASKED, {"model": tmp_path / "on the hub"}, SAID)
    assert not (tmp_path / "out" / FINISHED).exists()


@pytest.mark.slow
def test_the_command_says_the_same_and_imports_no_model(tmp_path):
    (tmp_path / "texts.txt").write_text("a = b\nfor x in y: print(x)\nimport os, sys\n" * 2)
    arguments = ["probe", "stdlib-2l", "--data", str(tmp_path / "texts.txt"), "--quiet"]
    arguments += ["--probes", "positions", "--out", str(tmp_path / "out")]
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\n"
        "from infoflow_lens.cli import app\n"
        f"done = CliRunner().invoke(app, {arguments!r})\n"
        "print(json.dumps([done.exit_code, done.stdout, done.stderr, 'torch' in sys.modules]))"
    )

    def started():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    first, again = started(), started()
    assert (first[0], again[0]) == (0, 0), first
    assert first[1] == again[1]
    assert "finished before" in again[2]
    assert (first[3], again[3]) == (True, False)

"""Certificates as documents, and their independent check; the command that writes them."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from typer.testing import CliRunner

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.cli import app
from infoflow_lens.studies.certificates import proof
from infoflow_lens.studies.certificates.documents import certificate_document
from infoflow_lens.studies.certificates.proof import verify, verify_weights, verify_witness
from infoflow_lens.studies.certificates.separability import check_witness


def question_answering():
    task = load_task("in_context_qa", n_questions=2, n_answers=2, n_pairs=2)
    x, y = task.all_sequences()
    sequences = [[task.token_names[t] for t in row] for row in x.tolist()]
    return task, x, y, sequences, [task.label_names[i] for i in y.tolist()]


def test_a_witness_is_checked_by_a_page_that_imports_nothing_of_ours():
    _, x, y, sequences, labels = question_answering()
    document, found = certificate_document(sequences, labels)
    assert document["verdict"] == "cannot fit"
    assert verify(document) == []
    assert check_witness(x, y, found.witness)
    imports = [
        line
        for line in Path(proof.__file__).read_text().splitlines()
        if line.startswith(("import", "from"))
    ]
    standard = {"json", "sys", "collections", "typing"}
    assert {line.split()[1] for line in imports} == standard


def test_a_model_is_checked_on_every_sequence():
    task = load_task("memorization", n_words=5, length=4, n_sequences=12)
    x, y = task.all_sequences()
    document, _ = certificate_document(x.tolist(), y.tolist())
    assert document["verdict"] == "fits"
    assert verify(document) == []
    spoilt = copy.deepcopy(document)
    for value in (0.5, True, "1"):
        spoilt["weights"] = [[0, "1", "1", value]]
        assert verify(spoilt) == [f"weight {value!r} is no integer"]
    spoilt["weights"] = []
    assert any("scores 0" in words for words in verify(spoilt))


@pytest.mark.parametrize("entry", range(0, 8, 3))
def test_no_changed_witness_passes(entry):
    *_, sequences, labels = question_answering()
    witness = certificate_document(sequences, labels)[0]["witness"]
    assert verify_witness(sequences, labels, witness) == []
    for change in ([0, None, 1], [0, None, -2]):
        other = [list(row) for row in witness]
        other[entry][2] += change[2]
        assert verify_witness(sequences, labels, other)
    assert "all entries are 0" in verify_witness(sequences, labels, [])
    flipped = [[i, c, -v] for i, c, v in witness]
    assert any("sign" in words for words in verify_witness(sequences, labels, flipped))
    assert any("no integer" in w for w in verify_witness(sequences, labels, [[0, "1", 0.5]]))
    assert any("no such" in w for w in verify_witness(sequences, labels, [[99, "1", 1]]))


def test_a_verdict_that_is_not_proved_is_named():
    *_, sequences, labels = question_answering()
    document, _ = certificate_document(sequences, labels)
    assert any("what is proved" in w for w in verify({**document, "verdict": "fits"}))
    assert verify({"sequences": [], "labels": []}) == ["expected a witness or weights, one of them"]
    assert "sequences end in several tokens" in verify_weights([["a"], ["b"]], ["1", "2"], [])


def certified(*arguments):
    return CliRunner().invoke(app, ["certify", *map(str, arguments), "--quiet"])


def test_csv_jsonl_and_datasets_give_the_same(tmp_path):
    rows = [("a b", "no"), ("a a", "yes"), ("b a", "no"), ("b b", "yes")]  # exclusive or
    (tmp_path / "one.csv").write_text("x,y\n" + "\n".join(f"{x},{y}" for x, y in rows))
    (tmp_path / "wide.csv").write_text(
        "left,right,y\n" + "\n".join(f"{x[0]},{x[2]},{y}" for x, y in rows)
    )
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"x": x.split(), "y": y}) for x, y in rows)
    )
    saved = datasets.Dataset.from_dict({"x": [x for x, _ in rows], "y": [y for _, y in rows]})
    saved.save_to_disk(str(tmp_path / "saved"))
    for name in ("one.csv", "wide.csv", "rows.jsonl", "saved"):
        out = tmp_path / f"{name}.json"
        result = certified(tmp_path / name, "--out", out)
        assert result.exit_code == 0, result.output
        assert "cannot fit" in result.output
        assert "put behind each" in result.output
        document = json.loads(out.read_text())
        assert verify(document) == []
        # anybody's Python, from the file alone
        alone = subprocess.run(
            [sys.executable, "-I", proof.__file__, str(out)], capture_output=True, text=True
        )
        assert (alone.returncode, alone.stdout.strip()) == (0, "proved")


def test_a_part_of_a_file_is_said_to_be_one(tmp_path):
    """Exclusive or without one of its rows fits: the verdict is of the rows that are taken."""
    (tmp_path / "xor.csv").write_text("x,y\na b,1\na a,0\nb a,1\nb b,0\n")
    part = certified(tmp_path / "xor.csv", "--n", 3)
    assert "The first 3 of 4 rows." in part.output
    assert "The first" not in certified(tmp_path / "xor.csv", "--n", 4).output


def test_options_that_change_nothing_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\na b,1\na a,0\n")
    assert "expected no --seed" in certified(tmp_path / "a.csv", "--seed", 5).output
    assert "no --label" in certified("in_context_qa", "--n", 5, "--label", "z").output


def test_a_task_is_certified_by_name(tmp_path):
    result = certified("in_context_qa", "--n", 200, "--json")
    assert result.exit_code == 0, result.output
    assert verify(json.loads(result.stdout)) == []


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("x,label\na b,1\n", [], "without 'y'"),
        ("y,z\n1,2\n", [], "without 'x'"),
        ("x,y\na b,1\na,2\n", [], "have lengths 1, 2"),
        ("x,y\na b,1\n", ["--n", "0"], "--n is 0"),
        # an empty field was a class, and a token, of its own
        ("a,b,y\n1,2,0\n2,1,1\n2,2,\n", [], "row 2 of"),
        ("a,b,y\n1,2,0\n2,,1\n", [], "row 1 of"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, arguments, message):
    (tmp_path / "bad.csv").write_text(text)
    result = certified(tmp_path / "bad.csv", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_what_is_no_file_and_no_token_task_is_refused():
    assert "there is no file" in certified("nowhere.csv").output
    assert f"{__file__!r} holds no rows" in certified(__file__).output
    # it drew them all first, for as long as that took
    assert "at most 5000 sequences" in certified("in_context_qa", "--n", 10**12).output
    assert "vector tokens" in certified("d_retrieval").output
    with pytest.raises(InfoFlowError, match="expected as many"):
        certificate_document([["a"]], [])


@pytest.mark.parametrize("content", [None, "no json", "[1, 2]", '{"witness": 3}'])
def test_what_is_no_certificate_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "certificate.json"
    if content is not None:
        path.write_text(content)
    assert proof.main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert proof.main([]) == 2

"""The command line: quick, clear, and clean when stopped."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from infoflow_lens import load_task, why
from infoflow_lens.cli import app
from infoflow_lens.commands import texts
from infoflow_lens.foundation.exclusions import verify_exclusion
from tests.processes import started
from tests.reference import zoo


def test_help_loads_no_model_library():
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from infoflow_lens.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0 and 'demo' in result.output\n"
        "print([m for m in ('torch', 'transformer_lens', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["inspect", "probe", "survey", "flow", "why", "ask", "serve"])
def test_every_command_says_the_same_of_models(command):
    """Four texts said it, none of which named GGUF files and LoRA, which all take."""
    shown = CliRunner().invoke(app, [command, "--help"])
    said = " ".join(shown.output.split())
    assert "a folder of a model or of a LoRA; a GGUF file; or a checkpoint of this package" in said


def test_what_an_option_takes_stands_in_its_help_and_its_error():
    """The flow without influence was in neither."""
    assert "auto|exact|estimate|resample|none" in CliRunner().invoke(app, ["flow", "--help"]).output
    shown = CliRunner().invoke(app, ["flow", "stdlib-2l", "x", "--influence", "off"])
    assert "expected one of auto, exact, estimate, resample, none" in shown.stderr


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("infoflow-lens 0.")


def test_a_bad_output_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "file"), "--quiet"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot write to the output folder")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["probe", "stdlib-2l", "--data", "repeated"],
        ["survey", "stdlib-2l", "--data", "missing.txt"],
        ["study", "head_count"],
        ["study", "top_k"],
        ["train-language-model", "stdlib-2l"],
    ],
)
def test_an_empty_name_is_no_output_folder(arguments):
    result = CliRunner().invoke(app, [*arguments, "--out", ""])
    assert result.exit_code == 2
    assert "it is empty: expected a name" in " ".join(result.stderr.split())


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_a_bad_seed_is_one_line(tmp_path, seed):
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--seed", seed, "--quiet"])
    assert result.exit_code == 2
    assert f"seed is {seed}" in result.stderr


def invoke(*arguments):
    return CliRunner().invoke(app, ["estimate", *arguments])


def test_estimate_prints_a_verdict():
    result = invoke("d_retrieval", "--heads", "3", "--components", "4", "--tokens", "64")
    assert result.exit_code == 0
    assert "max-position retrieval alone: excluded, proved" in " ".join(result.output.split())
    assert "Because" in result.output
    assert "Notes" in result.output
    assert "|I|: tokens that" in result.output  # the signs of the table in words


def test_estimate_for_machines():
    result = invoke("triangle_center", "--heads", "4,4", "--tokens", "64", "--positions", "--json")
    values = json.loads(result.output)
    assert values["min_information"] == 16
    assert values["upper_information"] == 24
    assert values["verified"] == 1.0


def test_estimate_of_a_million_tokens_is_quick():
    result = invoke("triangle_center", "--heads", "4,4", "--tokens", "1000000", "--json")
    assert json.loads(result.output)["min_information"] == 10**4


def test_the_sweep_prints_and_draws_the_phase_diagram(tmp_path):
    picture = tmp_path / "phase.svg"
    arguments = ["d_retrieval", "--heads", "5", "--tokens", "16", "--sweep", "heads,tokens"]
    result = invoke(*arguments, "--plot", str(picture))
    assert result.exit_code == 0
    assert (
        "X excluded, proved; x excluded by the paper's count; o allowed by construction"
        in result.output
    )
    assert "[flag]" in result.output
    assert picture.read_text().startswith("<?xml")
    summary = json.loads(invoke(*arguments, "--json").output)
    verdicts = {(row["heads"][0], row["n_tokens"]): row["verdict"] for row in summary["rows"]}
    assert set(verdicts) == {(h, t) for h in (1, 2, 3, 4, 5) for t in (8, 16)}
    assert verdicts[3, 16] == "excluded, proved"
    assert verdicts[3, 8] == "excluded, proved"  # four tokens matter, CLS holds three
    assert verdicts[4, 8] == "allowed by construction"
    assert summary["flags"]


def test_the_sweep_covers_the_heads_of_every_layer(tmp_path):
    arguments = ["intrinsic_dimension", "--heads", "3,2", "--tokens", "16"]
    picture = ["--plot", str(tmp_path / "phase.png")]
    result = invoke(*arguments, "--sweep", "heads,tokens", "--json", *picture)
    heads = {tuple(row["heads"]) for row in json.loads(result.output)["rows"]}
    assert heads == {(a, b) for a in (1, 2, 3) for b in (1, 2)}
    assert (tmp_path / "phase.png").stat().st_size > 1000


@pytest.mark.parametrize("task", ["position_sum", "in_context_qa"])
@pytest.mark.parametrize("more", [[], ["--positions"]])
def test_the_sweep_says_what_the_estimate_of_one_says(task, more):
    """Both of models with positions, or both of models without."""
    line = [task, "--heads", "1", "--json", *more]
    one = json.loads(invoke(*line).stdout)
    rows = json.loads(invoke(*line, "--sweep", "heads,tokens").stdout)["rows"]
    row = rows[-1]
    assert row["verdict"] == one["verdict"]
    # a task whose length follows from other sizes has no other
    assert len(rows) == (4 if task == "position_sum" else 1)
    assert one["verdict"] == ("allowed by construction" if more else "excluded, proved")


def test_a_witness_is_printed_and_saved(tmp_path):
    target = ["depth_separation", "--tokens", "12", "--heads", "2"]
    saved = tmp_path / "witness.json"
    result = invoke(*target, "--witness", "--out", str(saved))
    assert result.exit_code == 0, result.output
    witness = json.loads(result.stdout)
    held = json.loads(saved.read_text())
    assert witness == {name: value for name, value in held.items() if name != "digest"}
    task = load_task("depth_separation", n_tokens=12)
    assert verify_exclusion(witness, lambda x: task.target(torch.tensor(x)).tolist()) == []
    refused = invoke("depth_separation", "--tokens", "12", "--heads", "1,1", "--witness")
    assert refused.exit_code == 2
    assert "rests on no witness" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["d_retreival", "--heads", "4"], "did you mean 'd_retrieval'"),
        (["d_retrieval", "--heads", "4,x"], "--heads is '4,x'"),
        (["d_retrieval", "--heads", "0"], "n_heads"),
        (["d_retrieval", "--heads", "4", "--tokens", "0"], "--tokens is 0"),
        (["d_retrieval", "--heads", "4", "--components", "99999999"], "--components is 99999999"),
        (["d_retrieval", "--heads", "9999999999"], "--heads is '9999999999'"),
        (["d_retrieval"], "either --heads, such as 4,1, or --like"),
        (["d_retrieval", "--like", "gpt22"], "cannot be loaded"),
        (
            ["d_retrieval", "--heads", "999,999", "--sweep", "heads,tokens"],
            "expected at most 20000; ask for fewer heads",
        ),
        (["d_retrieval", "--heads", "4", "--count", "all"], "count is 'all'"),
        (["d_retrieval", "--heads", "4", "--trees", "0"], "trees is 0"),
        (["triangle_center", "--heads", "4", "--components", "2"], "no parameter 'n_components'"),
        (["d_retrieval", "--heads", "0,4", "--sweep", "heads,tokens"], "--heads are (0, 4)"),
        (["d_retrieval", "--heads", "4", "--sweep", "heads,tokens", "--trees", "0"], "trees is 0"),
        (["d_retrieval", "--heads", "4", "--sweep", "depth"], "--sweep is 'depth'"),
        (["d_retrieval", "--heads", "4", "--plot", "a.png"], "expected --sweep"),
        (
            ["d_retrieval", "--heads", "4", "--sweep", "heads,tokens", "--encoder"],
            "--sweep judges heads of one role, of any E: expected no --encoder",
        ),
        (
            ["d_retrieval", "--heads", "4", "--sweep", "heads,tokens", "--d-model", "8"],
            "--sweep judges heads of one role, of any E: expected no --d-model",
        ),
        (["all", "--heads", "4", "--sweep", "heads,tokens"], "expected no --sweep"),
        (
            ["all", "--like", "gpt2", "--components", "3", "--trees", "2"],
            "expected no --components and no --trees; leave it out",
        ),
        (["d_retrieval", "--like", "gpt2", "--d-model", "64"], "expected no --d-model"),
        (["d_retrieval", "--like", "gpt2", "--positions"], "expected no --positions"),
        (
            ["d_retrieval", "--heads", "4", "--sweep", "heads,tokens", "--plot", "a.doc"],
            "cannot draw to 'a.doc'",
        ),
    ],
)
def test_bad_estimates_are_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_is_a_clean_stop(tmp_path):
    arguments = ["demo", "--out", tmp_path, "--quiet"]
    with started("-m", "infoflow_lens.cli", *arguments, folder=tmp_path) as program:
        program.wait_until((tmp_path / "training" / "1" / "training.safetensors").exists)
        program.send_signal(signal.SIGINT)
        assert program.wait(300) == 130
        assert program.stderr.startswith("stopped: training stopped after epoch")
        assert "Traceback" not in program.stderr


def test_tasks_lists_every_task_with_parameters_and_comparisons():
    from infoflow_lens.tasks import list_tasks

    rows = json.loads(CliRunner().invoke(app, ["tasks", "--json"]).output)
    assert [row["name"] for row in rows] == list(list_tasks())
    by_name = {row["name"]: row for row in rows}
    assert by_name["triangle_center"]["order"] == by_name["triangle_center"]["dimension"] == 3
    assert by_name["in_context_qa"]["parameters"]["n_questions"] == 100
    assert by_name["memorization"]["input"] == "tokens"
    table = CliRunner().invoke(app, ["tasks"]).output
    assert all(name in table for name in by_name)


def test_tasks_prints_the_card_of_one():
    assert "# in_context_qa" in CliRunner().invoke(app, ["tasks", "in_context_qa"]).output
    (row,) = json.loads(CliRunner().invoke(app, ["tasks", "in_context_qa", "--json"]).output)
    assert row["name"] == "in_context_qa"
    result = CliRunner().invoke(app, ["tasks", "in_contxt_qa"])
    assert result.exit_code == 2
    assert "did you mean 'in_context_qa'" in result.output


def test_constructions_are_listed_with_their_parameters():
    from infoflow_lens.studies.constructions import list_constructions

    table = CliRunner().invoke(app, ["constructions"]).output
    assert all(name in table for name in list_constructions())
    assert "sharpness=20.0" in table


def test_token_tasks_are_estimated_too():
    result = invoke("in_context_qa", "--heads", "1,1", "--positions")
    assert result.exit_code == 0
    assert "all mechanisms: allowed" in result.output


def test_a_configuration_is_asked_by_name():
    result = invoke("d_retrieval", "--like", "gpt2", "--tokens", "32")
    assert result.exit_code == 0
    assert "12 layers, heads 12, E = 768, causal" in result.output
    assert "max-position retrieval alone: allowed" in result.output
    longer = invoke("d_retrieval", "--like", "gpt2", "--tokens", "2000")
    assert "takes 1023" in longer.output


def test_one_table_says_what_a_configuration_can_learn():
    found = json.loads(invoke("all", "--heads", "2,2", "--tokens", "8", "--json").stdout)
    verdicts = {(row["task"], row["components"]): row["verdict"] for row in found["rows"]}
    assert verdicts["d_retrieval", 2] == "allowed by construction"
    assert verdicts["position_sum", "-"] == "excluded, proved"
    assert len({row["task"] for row in found["rows"]}) == 13


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a small model, and one with a file of texts."""
    folder = tmp_path_factory.mktemp("model")
    zoo.save("gpt2", folder)
    texts = tmp_path_factory.mktemp("data") / "texts.txt"
    texts.write_text("\n".join(f"w{i} w{i + 1} w{i + 2} w{i}" for i in range(4, 34)))
    return str(folder), str(texts)


def test_inspect_shows_what_a_model_is(small):
    result = CliRunner().invoke(app, ["inspect", small[0]])
    assert result.exit_code == 0
    assert "GPT2LMHeadModel" in result.output
    assert "No problems found: nothing above keeps a probe from measuring." in result.output
    found = json.loads(CliRunner().invoke(app, ["inspect", small[0], "--json"]).stdout)
    assert [layer["n_heads"] for layer in found["layers"]] == [4, 4]


def test_inspect_says_that_a_tokenizer_is_not_there(tmp_path):
    folder = zoo.save("gpt2", tmp_path, with_tokenizer=False)
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert "it has no tokenizer: give token ids, not text" in result.output


def test_why_says_what_the_function_says(small):
    asked = ["why", small[0], "w5 w7 w9 w5", "--layer", "1", "--head", "2"]
    found = why(small[0], "w5 w7 w9 w5", 1, 2, progress=False)
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0
    assert "why this key" in shown.output
    assert found.table()["part"][0] in shown.output
    # a part of +0.000 had 332% of a margin that is small itself
    assert [*map(texts._write, (3.3e-4, 0, -1.2))] == ["+3.3e-04", "+0.000", "-1.200"]
    said = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert said["margin"] == found.margin
    assert said["keys"] == list(found.keys)
    assert [part["value"] for part in said["by_query"]] == found.table("query")["value"].tolist()
    chosen = CliRunner().invoke(app, [*asked, "--keys", "2,0", "--json"])
    assert json.loads(chosen.stdout)["keys"] == [2, 0]
    refused = CliRunner().invoke(app, [*asked, "--keys", "2"])
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1].startswith("error: keys are")


def test_inspect_of_what_is_no_model(tmp_path):
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def probe(small, out, *arguments):
    return CliRunner().invoke(
        app,
        ["probe", small[0], "--data", small[1], "--out", str(out), "--quiet", *arguments],
    )


def test_probe_prints_mechanisms_and_agreement(small, tmp_path):
    result = probe(small, tmp_path, "--n-detail", "4", "--ranks", "1,2")
    assert result.exit_code == 0, result.output
    assert ": heads 0." in result.output
    assert "measured against predicted" in result.output
    assert "of the variance unexplained" in result.output
    assert (tmp_path / "report.html").is_file()


def test_what_says_nothing_is_said_in_words(small, tmp_path):
    """Two tokens: the set of the last state holds the other one or not, so it says nothing."""
    out = tmp_path / "out"
    result = probe(small, out, "--max-length", "2", "--probes", "influence", "--ranks", "1")
    assert result.exit_code == 0, result.output
    assert "nan" not in result.output
    assert re.search("empty set|set holds", result.output)
    assert "nan" not in (out / "report.html").read_text().split("<script", 1)[0].lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probes", "positions,recoverie"], "did you mean 'recovery'"),
        (["--ranks", "1,a"], "--ranks is '1,a'"),
        (["--column", "ids"], "lines of text and no columns"),
        (["--influence", "exakt"], "did you mean 'exact'"),
        (["--ranks", "1,2,3,4,5,6,7"], "rank 7 is beyond the number of keys"),
        (["--metric", "mse"], "metric is 'mse'"),
        (["--n", "3", "--probes", "recovery"], "expected at least 5"),
        (["--max-length", "1", "--ranks", "1,2"], "rank 2 is beyond"),
        (["--backend", "hoked"], "did you mean 'hooked'"),
    ],
)
def test_bad_probe_runs_are_one_line(small, tmp_path, arguments, message):
    result = probe(small, tmp_path, "--n-detail", "1", *arguments)
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert not list(tmp_path.glob("*.safetensors")) or message.startswith(("rank", "exp", "metric"))


@pytest.mark.parametrize(
    "given",
    [
        ["study", "head_count", "--preset", "smoke", "--jobs", "2", "--out", "a b"],
        ["study", "specific_position", "--scheduler", "tcp://x:1", "--resume", "--quiet"],
        ["study", "sufficiency", "--model", "stdlib-2l", "--model", "x y", "--data", "t.txt"],
        ["study", "top_k", "--model", "m", "--scheduler", "tcp://x:1", "--threads", "4"],
    ],
)
def test_the_hint_how_to_go_on_is_the_command_as_it_was_given(given, monkeypatch):
    """What a lost worker or Ctrl-C is answered with, runs the same with --resume."""
    seen = []

    def stopped(study, out, *, again, **settings):
        seen.append(((study.name, vars(study), out, {**settings, "resume": True}), again))
        raise KeyboardInterrupt

    monkeypatch.setattr("infoflow_lens.studies.sweep.run_study", stopped)
    CliRunner().invoke(app, given)
    words = shlex.split(seen[0][1])
    assert words[0] == "infoflow-lens"
    assert "--resume" in words
    CliRunner().invoke(app, words[1:])
    assert seen[1] == seen[0]


def test_studies_are_listed_with_their_rules():
    from infoflow_lens.studies.registry import STUDY_KINDS

    listed = CliRunner().invoke(app, ["study", "--list"]).output
    for name, kind in STUDY_KINDS.items():
        assert f"{name}: {kind.title}" in listed
        assert f"{kind().rule()}\n  presets: {', '.join(kind.presets)}" in listed


def test_study_runs_a_study_and_prints_its_verdict(tmp_path):
    arguments = ["study", "kth_largest", "--preset", "smoke", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    assert "**. The rule:" in result.output  # whatever the verdict, after so few epochs
    assert (tmp_path / "results.csv").is_file()
    again = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert again.exit_code == 2
    assert "go on with --resume" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["specific_positions"], "did you mean 'specific_position'"),
        ([], "no study is named"),
        (["head_count", "--preset", "fast"], "preset is 'fast'"),
        (["head_count", "--model", "gpt2"], "head_count trains models of its own"),
        (["top_k"], "no model is named"),
    ],
)
def test_bad_studies_are_one_line(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_a_terminal_without_columns_is_written_to():
    """Some say so of themselves, and whatever Rich prints was nothing."""
    asked = ["estimate", "kth_largest", "--tokens", "8", "--heads", "1"]
    wide, none = (CliRunner().invoke(app, asked, env={"COLUMNS": n}) for n in ("80", "0"))
    assert none.exit_code == 0
    assert none.stdout == wide.stdout != ""

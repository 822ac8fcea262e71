"""A probe run on any model: whole, resumed, refused, and the same as the probes alone."""

import json
import math
import re
import shutil
from dataclasses import replace

import datasets
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    PositionsProbe,
    RecoveryProbe,
    compare,
    load_any,
    probe,
    propagate,
    run_probes,
    save_model,
)
from infoflow_lens.hooks import AttendedProbe, PatternsProbe, label_heads
from infoflow_lens.hooks.model import semantics
from infoflow_lens.probing import parts as heads
from infoflow_lens.probing import run as run_module
from infoflow_lens.probing import shard
from infoflow_lens.probing.config import ProbingConfig, part_names
from infoflow_lens.probing.data import stream_data, stream_texts
from infoflow_lens.probing.page import build_flow_view, build_report, per_head
from infoflow_lens.probing.run import run_probing
from infoflow_lens.runs.folder import MANIFEST
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import some_of
from tests.reference import zoo
from tests.reference.data import read_data

TEXTS = [" ".join(f"w{(7 * i + j) % 30 + 4}" for j in range(4 + i % 5)) for i in range(20)]


pytestmark = pytest.mark.filterwarnings(  # few rows are told of
    "ignore::infoflow_lens.foundation.errors.InfoFlowWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    zoo.save("gpt2", path, n_head=2)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "texts.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


@pytest.fixture(scope="module")
def config(folder, texts):
    return ProbingConfig(str(folder), str(texts), ranks=(1, 2), batch_size=4, n_detail=4)


def run(out, config, **arguments):
    return run_probing(out, config, progress=False, **arguments)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """A run of these settings, in whose folder no test changes anything."""
    return run(tmp_path_factory.mktemp("whole"), config)


def test_a_run_gives_what_the_probes_give(whole, folder):
    found = whole
    model = load_any(str(folder)).model
    ids = [model.to_tokens(text)[0] for text in TEXTS]
    positions, recovery = run_probes(
        model, ids, [PositionsProbe((1, 2), spread=True), RecoveryProbe((1, 2))], progress=False
    )
    labels = label_heads(model, ids[:4], batch_size=4, progress=False)
    probes = [PositionsProbe((1, 2)), AttendedProbe(), JacobianInfluence("resid_post")]
    chosen, attended, influence = run_probes(model, ids[:4], probes, progress=False)
    assert found.positions.to_frame().round(4).equals(positions.to_frame().round(4))
    pd.testing.assert_frame_equal(found.recovery.to_frame(), recovery.to_frame(), rtol=1e-3)
    pd.testing.assert_frame_equal(found.labels.to_frame(), labels.to_frame(), rtol=1e-3, atol=1e-6)
    expected = compare(propagate(chosen.argmax), influence)
    assert found.agreement["max_position"].cls.auroc == pytest.approx(expected.cls.auroc)
    assert set(found.agreement) == {"max_position", "mechanisms"}
    sets = propagate(labels.rules(attended, chosen))
    assert found.predicted["mechanisms"].members.equal(sets.members)
    # what each of them says of a head, in one row
    heads = per_head(found)
    assert len(heads) == 2 * 2
    for name, column in found.positions.summary().drop(columns=["layer", "head"]).items():
        assert heads[name].equals(column), name
    for rank, of_rank in found.recovery.to_frame().groupby("rank"):
        assert heads[f"fvu_{rank}"].tolist() == of_rank["fvu"].tolist()
    for name, column in found.labels.to_frame().items():
        assert heads[name].equals(column), name


def test_a_run_writes_tables_tensors_record_and_report(whole):
    found, out = whole, whole.out
    for name in ("positions", "recovery", "influence", "labels"):
        assert (out / f"{name}.safetensors").is_file()
        assert len(pd.read_csv(out / f"{name}.csv")) > 0
    table = pd.read_csv(out / "agreement.csv")
    last = table[(table["states"] == "cls") & (table["rule"] == "max_position")]
    assert float(last["influence_inside"].iloc[0]) == pytest.approx(
        found.agreement["max_position"].cls.influence_inside
    )
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["ranks"] == [1, 2]
    assert record["model_fingerprint"] == found.record.model_fingerprint
    saved = datasets.Dataset.from_file(str(out / "inputs" / "sequences.arrow"))
    assert [len(row) for row in saved["input_ids"]] == [5 + i % 5 for i in range(20)]  # with BOS
    page = (out / "report.html").read_text()
    assert "default-src 'none'" in page  # it fetches nothing
    assert "max_position" in page
    assert "w11" in page
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    named = {json.loads(line)["name"] for line in (out / MANIFEST).read_text().splitlines()[1:]}
    files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert named == files - {MANIFEST}


def test_the_picture_opens_on_what_comes_from_afar_and_has_all_weights(whole, folder):
    view = build_flow_view(whole)
    last = [view.inputs[i].influence[-1, -1] for i in range(3)]
    shares = [row[:-2].max() / row[:-1].sum() for row in last]  # but of the own and the next token
    assert view.first == max(range(3), key=lambda i: shares[i])
    model = load_any(str(folder)).model
    (patterns,) = run_probes(
        model, [model.to_tokens(TEXTS[0])[0]], [PatternsProbe()], progress=False
    )
    for layer, keys in enumerate(view.inputs[0].ranked):
        weights = patterns.patterns[layer][0].gather(-1, keys.long().clamp(min=0))
        shown = view.inputs[0].weights[layer]
        torch.testing.assert_close(shown[keys >= 0], weights[keys >= 0], rtol=1e-3, atol=1e-5)


def test_the_headline_ranks_tokens_also_where_sets_hold_everything(whole):
    """By the best path of every token, as in the picture; of as many as hold 90%."""
    shares = []
    for view in build_flow_view(whole).inputs[:4]:
        keys = [each[None, ..., 0] for each in view.ranked]
        weights = [each[None, ..., 0] for each in view.weights]
        strength = propagate(keys, strength=weights).strengths[-1, 0, -1, :-1].tolist()
        amount = view.influence[-1, -1, :-1].tolist()
        n = next(n for n in range(99) if sum(sorted(amount)[::-1][:n]) >= 0.9 * sum(amount))
        strongest = sorted(range(len(amount)), key=lambda s: -strength[s])[:n]
        shares.append((sum(amount[s] for s in strongest) / sum(amount), n / len(amount)))
    said = build_report(whole).headline.split("At least")[1]
    expected = [100 * sum(column) / 4 for column in zip(*shares, strict=True)]
    percents = [int(each) for each in re.findall(r"(\d+)%", said)]
    assert percents == pytest.approx([90, *expected], abs=0.51)


def test_sequences_of_several_shards_are_compared_as_those_of_one(tmp_path, config):
    only = replace(config, probes=("influence", "positions"), n=6, n_detail=6)
    one, several = (run(tmp_path / str(n), replace(only, shard=n)) for n in (6, 4))
    assert several.positions.n_shards == 2
    assert several.agreement == one.agreement
    assert several.explained == one.explained


def test_errors_of_maps_that_fit_anything_are_not_shown(tmp_path, config):
    few = run(tmp_path / "few", replace(config, n=5, n_detail=4, max_length=3, ranks=(1,)))
    assert few.recovery.n_fit[0] < few.recovery.n_features[0]
    report = build_report(few)
    (section,) = (each for each in report.sections if "give the attended" in each.title)
    assert "fewer than features" in section.text
    assert all(math.isnan(v) for chart in section.figures for row in chart.values for v in row)
    assert "recovery" not in report.heads.columns
    assert "label" in report.heads.columns
    assert report.maps.title == "What describes each head"  # which leads
    page = (tmp_path / "few" / "report.html").read_text()
    assert page.index("was replaced by ideal ones") < page.index("How far predicted sets explain")


def test_an_interrupted_run_goes_on_without_repeating(tmp_path, config, monkeypatch):
    """Labels: tests/probing/parts/test_labels.py."""
    model = load_any(config.model).model
    seen, original = [], type(model).forward
    finding = []  # what is found of a model once is no batch of the run
    visible = semantics._visible

    def found_once(*args):
        finding.append(1)
        try:
            return visible(*args)
        finally:
            finding.pop()

    monkeypatch.setattr(semantics, "_visible", found_once)

    def counted(stop_after):
        def forward(self, given, *args, **kwargs):
            if not finding and len(given) == 4:
                seen.append(len(given))
                if stop_after is not None and len(seen) > stop_after:
                    raise KeyboardInterrupt
            return original(self, given, *args, **kwargs)

        return forward

    only = ProbingConfig(**{**vars(config), "probes": ("positions", "recovery")})
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counted(None))
        whole = run(tmp_path / "whole", only)
        seen.clear()
        patch.setattr(type(model), "forward", counted(2))
        with pytest.raises(KeyboardInterrupt):
            run(out, only)
        done = len(seen)
        patch.setattr(type(model), "forward", counted(None))
        seen.clear()
        found = run(out, only)
    assert done == 3
    assert len(seen) == 3  # of five batches, two were finished
    assert found.positions.to_frame().equals(whole.positions.to_frame())
    pd.testing.assert_frame_equal(found.recovery.to_frame(), whole.recovery.to_frame(), rtol=1e-6)
    with monkeypatch.context() as patch:  # all is finished: nothing is run but the inspection
        patch.setattr(shard, "run_shard", None)
        run(out, only)


def test_a_folder_of_other_settings_is_refused(tmp_path, config, texts):
    only = ProbingConfig(**{**vars(config), "probes": ("positions",)})
    run(tmp_path, only)
    with pytest.raises(InfoFlowError, match=r"settings \(ranks\) changed .*\(1, 2\) -> \(1\)"):
        run(tmp_path, ProbingConfig(**{**vars(only), "ranks": (1,)}))


def test_what_a_part_refuses_leaves_the_folder_to_other_settings(tmp_path, config):
    few = {**vars(config), "probes": ("labels",), "n_detail": 3}
    with pytest.raises(
        InfoFlowError, match="half of them to judge, and there are 3; give --n-detail 4"
    ):
        run(tmp_path, ProbingConfig(**few))
    assert list(tmp_path.iterdir()) == []
    run(tmp_path, ProbingConfig(**{**few, "n_detail": 4}))


@pytest.mark.parametrize("name", ["mechanisms", "sufficiency"])
def test_parts_that_are_gone_are_refused_with_the_new_name(config, name):
    with pytest.raises(InfoFlowError, match=f"'{name}' was removed in 0.4: expected 'labels'"):
        replace(config, probes=("positions", name))


def test_what_the_sequences_are_too_few_for_is_left_out_unless_it_is_asked_for(tmp_path, config):
    few, said = replace(config, n=4, n_detail=2), []
    found = run(tmp_path / "all", few, say=said.append)
    assert "recovery" not in found.found
    assert "positions" in found.found
    assert any("left out: recovery fits" in line and "of 4 none is left" in line for line in said)
    with pytest.raises(InfoFlowError, match="expected at least 5; give more text"):
        run(tmp_path / "one", replace(few, probes=("positions", "recovery")))
    assert not (tmp_path / "one").exists()
    run(tmp_path / "five", replace(few, probes=("recovery",), n=5))


def test_changed_data_are_refused(tmp_path, config):
    data = tmp_path / "data.txt"
    data.write_text("w5 w6 w7\nw8 w9\n")
    only = ProbingConfig(**{**vars(config), "probes": ("positions",), "data": str(data)})
    run(tmp_path / "out", only)
    data.write_text("w5 w6 w7\nw8 w10\n")
    with pytest.raises(InfoFlowError, match="the data changed"):
        run(tmp_path / "out", only)


@pytest.mark.parametrize("window", some_of([None, 6], 6))
def test_what_is_tokenised_is_not_tokenised_again(tmp_path, config, texts, monkeypatch, window):
    """By the contents of the data, the tokenizer and the settings, wherever the data lie."""
    only = replace(config, probes=("positions",), window=window)
    whole = run(tmp_path / "out", only)
    moved = shutil.copy(texts, tmp_path / "moved.txt")
    (tmp_path / "out" / "positions.json").unlink()  # it is not finished
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "stream_data", None)
        again = run(tmp_path / "out", replace(only, data=str(moved)))
    assert again.positions.to_frame().equals(whole.positions.to_frame())
    asked = []
    monkeypatch.setattr(
        run_module, "stream_data", lambda *a, **s: asked.append(s) or stream_data(*a, **s)
    )
    with pytest.raises(InfoFlowError, match="the data changed"):
        run(tmp_path / "out", replace(only, n=5))
    (tmp_path / "out" / "inputs" / "sequences.arrow").write_bytes(b"spoiled")
    run(tmp_path / "out", only)
    assert len(asked) == 2


def test_nothing_is_written_but_below_the_folder_of_the_run(tmp_path, config, monkeypatch):
    """`datasets` would keep what it reads in a cache at home."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setattr(datasets.config, name, home / name)
    monkeypatch.setattr("tempfile.tempdir", str(home))
    for window in (None, 6):
        run(
            tmp_path / str(window),
            replace(config, data=str(rows), window=window, probes=("positions",)),
        )
    assert list(home.rglob("*")) == []


def test_finished_parts_stay_when_a_later_one_fails(tmp_path, config, monkeypatch):
    def fail(*args, **kwargs):
        raise InfoFlowError("labels fail")

    monkeypatch.setattr(heads, "label_heads", fail)
    with pytest.raises(InfoFlowError, match="labels fail"):
        run(tmp_path, config)
    assert (tmp_path / "positions.safetensors").is_file()
    assert (tmp_path / "influence.json").is_file()


def test_a_model_of_ours_on_its_task(tmp_path):
    model, _ = build_construction("d_retrieval", n_tokens=6)
    save_model(model, tmp_path / "model")
    found = run(
        tmp_path / "out",
        ProbingConfig(str(tmp_path / "model"), "d_retrieval", n=40, n_detail=20, ranks=(1, 2)),
    )
    assert found.agreement["max_position"].cls.influence_inside > 0.95
    assert found.labels.metric == "nmse"
    assert found.texts[0] == tuple("012345")


@pytest.mark.parametrize("kind", ["exact", "estimate", "resample"])
def test_a_run_has_one_value_of_influence_inside_named_by_what_was_measured(tmp_path, config, kind):
    """Terminal, page, curve, frame and a sum by hand; an estimate is of the last position alone."""
    settings = {**vars(config), "probes": ("influence",), "influence": kind}
    found = run(tmp_path, ProbingConfig(**settings))
    rows = (found.influence.positions >= 0).sum(dim=1).tolist()
    assert rows == ([1] * 4 if kind == "estimate" else [5, 6, 7, 8])
    assert 0 <= found.agreement["max_position"].cls.influence_inside <= 1
    last = found.last["max_position"]
    shares = []
    full, n = found.influence.full()[-1], found.influence.lengths
    for sequence, t in enumerate((n - 1).tolist()):
        held = found.predicted["max_position"].members[-1, sequence, t, :t]
        if 0 < held.sum() < t:
            amount = full[sequence, t, :t]
            shares.append(float(amount[held].sum() / amount.sum()))
    assert last.inside == pytest.approx(sum(shares) / len(shares))
    assert found.curve.last[0] == pytest.approx(last.inside)
    curve = pd.read_csv(tmp_path / "coverage_curve.csv")
    assert curve["last"][0] == pytest.approx(last.inside)
    explained = pd.read_csv(tmp_path / "explained.csv")
    assert explained["inside"][0] == pytest.approx(last.inside)
    page = (tmp_path / "report.html").read_text()
    assert f"{last.inside:.0%} of their measured" in page
    assert ("all positions" in page) == (kind != "estimate")
    labels = [states for states, _ in found.explained]
    assert labels[0].startswith("last position")
    assert len(set(labels)) == len(labels)
    assert any(f"{last.inside:.0%}" in line for line in found.findings())


def rows(path):
    ids = [[5, 6, 7], [8, 9]]
    return pd.DataFrame({"input_ids": ids, "text": ["w5 w6 w7", "w8 w9"]})


def write(path, kind):
    table = rows(path)
    if kind == "jsonl":
        table.to_json(path, orient="records", lines=True)
    elif kind == "json":
        table.to_json(path, orient="records")
    elif kind == "csv":
        table[["text"]].to_csv(path, index=False)
    elif kind == "parquet":
        table.to_parquet(path)
    elif kind == "txt":
        path.write_text("w5 w6 w7\n\nw8 w9\n")
    elif kind == "pt":
        torch.save(torch.tensor([[5, 6, 7], [8, 9, 9]]), path)
    elif kind == "safetensors":
        save_file({"ids": torch.tensor([[5, 6, 7], [8, 9, 9]])}, path)
    else:
        datasets.Dataset.from_pandas(table).save_to_disk(path)


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "parquet", "txt", "pt", "safetensors", "folder"]
)
def test_data_of_every_kind(tmp_path, folder, kind):
    path = tmp_path / (kind if kind == "folder" else f"data.{kind}")
    write(path, kind)
    model = load_any(str(folder)).model
    found = read_data(model, str(path)).whole()
    bos = [model.tokenizer.bos_token_id] if kind in ("csv", "txt") else []
    assert found.tokens[0].tolist()[: 3 + len(bos)] == [*bos, 5, 6, 7]
    assert read_data(model, str(path), n=1).n_sequences == 1


def test_repeated_random_tokens(folder):
    model = load_any(str(folder)).model
    ids = read_data(model, "repeated", n=5, max_length=11).whole().tokens
    assert ids.shape == (5, 11)
    assert (ids[:, 0] == model.tokenizer.bos_token_id).all()
    assert ids[:, 1:6].equal(ids[:, 6:])
    assert all(len(set(row.tolist())) == 5 for row in ids[:, 1:6])


def test_a_model_without_room_for_two_tokens_twice_is_refused(folder):
    model = load_any(str(folder)).model
    with pytest.raises(InfoFlowError, match=r"'repeated' with n_ctx .* room for two tokens twice"):
        read_data(model, "repeated", n=5, max_length=4)  # BOS takes one of the four


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "data is empty"),
        ("missing.txt", "there is no file"),
        ("repeatd", "did you mean 'repeated'"),
        ("d_retrieval", "has vector tokens"),
    ],
)
def test_data_that_are_not_there(folder, data, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InfoFlowError, match=message):
        read_data(load_any(str(folder)).model, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probes": ("position",)}, "did you mean 'positions'"),
        ({"probes": ()}, r"probes are \(\): expected"),
        ({"probes": ("positions", "positions")}, "probes are .*: expected one or more different"),
        ({"influence": "exactly"}, "did you mean 'exact'"),
        ({"ranks": (2, 3)}, "expected 1 to some K"),
        ({"metric": "mse"}, "did you mean 'nmse'"),
        ({"sketch": 1}, "sketch is 1"),
    ],
)
def test_bad_settings_are_named(config, change, message):
    with pytest.raises(InfoFlowError, match=message):
        ProbingConfig(**{**vars(config), **change})


def test_what_a_model_cannot_give_is_refused_before_work_starts(tmp_path, texts):
    """A bridge that loses edits."""
    model, out = zoo.bridge("opt"), tmp_path / "out"
    settings = {"ranks": (1, 2), "batch_size": 4, "n_detail": 3, "progress": False}
    with pytest.raises(InfoFlowError, match=r"labels cannot be measured in layers 0-1") as said:
        probe(model, texts, out, probes=part_names(), **settings)
    assert "give the model that it hosts" in str(said.value)
    assert not (tmp_path / "out").exists()
    said = []
    found = probe(model, texts, out, say=said.append, **settings)  # all that it can give
    assert any(line.startswith("left out: labels cannot be measured") for line in said)
    assert found.labels is None
    assert found.agreement["max_position"].cls.influence_inside > 0


def test_donors_are_other_sequences_where_there_are_any(tmp_path, config):
    """Of texts of different lengths, tokens come from those that are not measured."""
    asked = ProbingConfig(
        **{**vars(config), "probes": ("influence",), "influence": "resample", "n_detail": 2}
    )
    found = run(tmp_path / "out", asked)
    assert found.influence.record.config["n_donors"] == 8
    last = found.influence.influence[-1, 0, -2, : int(found.influence.lengths[0])]
    assert (last[:-1] > 0).any()


def test_one_sequence_has_no_donor(tmp_path, config):
    data = tmp_path / "one.txt"
    data.write_text("w5 w6 w7")
    asked = ProbingConfig(
        **{**vars(config), "probes": ("positions", "influence"), "influence": "resample",
           "data": str(data)}
    )  # fmt: skip
    with pytest.raises(InfoFlowError, match="only one has a token 0"):
        run(tmp_path / "out", asked)
    assert not list((tmp_path / "out").glob("positions*"))


def test_rows_of_mixed_kinds_are_one_error(tmp_path, folder):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": [], "tokens": [3]}\n{"text": -6.2, "tokens": [4]}\n')
    with pytest.raises(InfoFlowError, match=r"data.jsonl' cannot be read \(ArrowInvalid"):
        read_data(load_any(str(folder)).model, str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\xff\xfe\x00w", "cannot be read .*UTF-8"), (b"\n\n", "holds no rows")],
)
def test_files_that_cannot_be_read(tmp_path, folder, content, message):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(InfoFlowError, match=message):
        read_data(load_any(str(folder)).model, str(path))


def test_windows_need_no_room_but_the_folder_of_the_run(tmp_path, config, monkeypatch):
    """Their tokens may be gigabytes, and the system's temporary folder small, or not there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    asked = {**vars(config), "window": 6, "probes": ("positions",)}
    assert run(tmp_path / "out", ProbingConfig(**asked)).positions.lengths.tolist() == [6] * 24


def test_a_parquet_file_is_read_some_rows_at_a_time(tmp_path):
    """A few hundred bytes may hold a group of rows that is gigabytes unpacked."""
    import pyarrow

    words = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 3_000_000, pyarrow.int32()), pyarrow.array(["w5 w6 w7 w8 w9"])
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": words}), tmp_path / "x.parquet", row_group_size=3_000_000
    )
    del words
    before = pyarrow.total_allocated_bytes()
    texts = stream_texts(str(tmp_path / "x.parquet"))
    assert next(texts) == "w5 w6 w7 w8 w9"
    assert pyarrow.total_allocated_bytes() - before < 30e6


def test_ranks_beyond_the_keys_leave_the_folder_to_other_ranks(folder, tmp_path):
    """They are refused before the folder is claimed."""
    path, out = tmp_path / "texts.txt", tmp_path / "out"
    path.write_text("\n".join(TEXTS))
    config = ProbingConfig(model=str(folder), data=str(path), probes=("positions",), max_length=2)
    with pytest.raises(InfoFlowError, match="rank 4 is beyond the number of keys"):
        run_probing(out, config, progress=False)
    run_probing(out, replace(config, ranks=(1, 2)), progress=False)

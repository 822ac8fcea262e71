"""`infoflow_lens.probe` does what the command does, also on what is in memory."""

import inspect
import json
from dataclasses import asdict
from html import escape

import numpy as np
import pytest
import torch
from datasets import Dataset

from infoflow_lens import InfoFlowError, load_any, probe
from infoflow_lens.probing.config import ProbingConfig, part_names
from infoflow_lens.probing.page import build_flow_view, build_report
from infoflow_lens.probing.part import load_part
from infoflow_lens.probing.run import run_probing
from tests.reference import zoo

TEXTS = [" ".join(f"w{(7 * i + j) % 30 + 4}" for j in range(4 + i % 5)) for i in range(20)]
SETTINGS = {"ranks": (1, 2), "n_detail": 10, "batch_size": 4, "progress": False}
pytestmark = pytest.mark.filterwarnings(  # few rows are told of
    "ignore::infoflow_lens.foundation.errors.InfoFlowWarning"
)


@pytest.fixture(scope="module")
def hf_model():
    return zoo.build("gpt2")


@pytest.fixture(scope="module")
def found(hf_model):
    return probe(hf_model, TEXTS, tokenizer=zoo.tokenizer(), probes=part_names(), **SETTINGS)


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    return found.report(tmp_path_factory.mktemp("page") / "page.html").read_text("utf-8")


@pytest.mark.parametrize("name", part_names())
def test_every_part_shows_itself_and_has_its_section(name, found, page):
    result, part = found.found[name], load_part(name)
    assert len(result.to_frame())
    assert len(result.plot().axes)
    assert name == "influence" or escape(part.title) in page
    for paragraph in part.remarks(result).splitlines():  # one wall of text beside its figures
        assert f"<p>{escape(paragraph)}</p>" in page


def test_the_page_says_which_measure_is_nearest_to_influence(found, page):
    """By the table of routes: AUROC in the last layer, at the size of the model's own sets."""
    rows = found.found["routes"].to_frame()
    sets = rows["size_of"].iloc[0]
    rows = rows[(rows["size_of"] == sets) & (rows["layer"] == rows["layer"].max())]
    best = rows.loc[rows["auroc"].where(rows["method"] != "measured").idxmax()]
    own = rows.loc[rows["method"] == sets, "auroc"].item()
    assert f"{best['method']} is nearest to influence (AUROC {best['auroc']:.3f}" in page
    assert f"the set {own:.3f}" in page


def test_what_is_left_out_is_left_out_of_weights_and_of_the_sentence_on_strengths(hf_model):
    """The weights shown are those of the keys shown, and the first token is no candidate."""
    ids = [torch.arange(4 + i, 10 + i + i % 3) for i in range(10)]
    made = probe(hf_model, ids, probes=("influence",), without=(0,), **SETTINGS)
    viewed, rows = build_flow_view(made), []
    for index, sequence in enumerate(ids):
        with torch.no_grad():
            patterns = hf_model(sequence[None], output_attentions=True).attentions
        n = len(sequence)
        held = torch.eye(n)
        for layer, pattern in enumerate(patterns):
            open_keys = pattern[0].clone()
            open_keys[..., 0] = 0  # which no head passes on
            weight, key = open_keys.max(dim=-1)
            if index < len(viewed.inputs):
                shown = viewed.inputs[index].weights[layer][..., 0]
                torch.testing.assert_close(shown[:, 1:], weight[:, 1:], rtol=0, atol=1e-4)
            brought = (weight[..., None] * held[key]).amax(dim=0)
            held = torch.maximum(held, brought)
        # candidates are the tokens between the first and the state's own
        others = made.influence.full()[-1, index, n - 1, 1 : n - 1].double()
        most = others.sort(descending=True).values.cumsum(0)
        count = int((most < 0.9 * others.sum()).sum()) + 1
        strongest = held[n - 1, 1 : n - 1].argsort(descending=True, stable=True)[:count]
        inside = others[strongest].sum() / others.sum()
        rows.append((count, float(inside), count / (n - 2)))
    count, inside, chance = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    expected = (
        f"At least {count:.1f} tokens, on average, are needed to hold 90% of the influence: as "
        f"many tokens with the strongest best paths hold {inside:.0%}, as many at random "
        f"{chance:.0%}."
    )
    assert expected in build_report(made).headline
    # what the command prints says of how many sequences it is
    row, (said,) = made.last["max_position"], made.to_output()["rows"]
    assert 0 < row.n_informative < row.n_states == 10
    assert said[-1].endswith(f"; {row.n_informative} of 10 sets could be wrong")


def test_what_a_window_hides_is_no_candidate_of_the_sentence_on_strengths():
    """Two layers of Mistral see three keys back each, so that the last state has six others."""
    ids = zoo.tokens(10, 14)
    made = probe(zoo.build("mistral"), ids, probes=("influence",), **SETTINGS)
    assert made.last["max_position"].others == 6
    counts = []
    for others in made.influence.full()[-1, :, -1, 7:13].double():
        most = others.sort(descending=True).values.cumsum(0)
        counts.append(int((most < 0.9 * others.sum()).sum()) + 1)
    chance = sum(counts) / len(counts) / 6
    assert f"many at random {chance:.0%}." in build_report(made).headline
    (viewed, *_) = build_flow_view(made).inputs
    assert viewed.possible[:, -1].tolist() == [6, 6]


def test_what_is_in_memory_gives_what_files_give(found, tmp_path):
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    named = probe(folder, tmp_path / "texts.txt", tmp_path / "out", **SETTINGS)
    numbers = [
        {rule: asdict(agreement) for rule, agreement in one.agreement.items()}
        for one in (named, found)
    ]
    np.testing.assert_equal(*numbers)  # NaN equals NaN
    assert named.positions.to_frame().equals(found.positions.to_frame())
    assert (tmp_path / "out" / "report.html").is_file()
    assert named.out == tmp_path / "out"
    assert json.loads((tmp_path / "out" / "record.json").read_text())


def test_windows_of_texts_in_memory_are_those_of_files(hf_model, tmp_path):
    rows = tmp_path / "texts.jsonl"
    rows.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    settings = {**SETTINGS, "probes": ("positions",), "window": 8, "n": 5}
    settings["tokenizer"] = zoo.tokenizer()
    named = probe(hf_model, rows, **settings)
    in_memory = ({"text": TEXTS}, TEXTS, Dataset.from_dict({"text": TEXTS}))
    for data in in_memory:
        found = probe(hf_model, data, **settings)
        assert found.texts == named.texts
        assert found.positions.lengths.tolist() == [8] * 5
    ids = zoo.tokens(4, 11)
    assert probe(hf_model, ids, **settings).positions.lengths.tolist() == [8] * 4


def test_without_a_folder_nothing_is_kept_but_the_result(found, tmp_path, monkeypatch):
    assert found.out is None
    page = found.report(tmp_path / "new" / "page.html")
    assert page.read_text(encoding="utf-8").count("GPT2LMHeadModel in memory") >= 1


def test_no_folder_is_left_behind(hf_model, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ids = torch.randint(4, 30, (6, 5), generator=torch.Generator().manual_seed(0))
    result = probe(hf_model, ids, probes=("positions",), n=4, **SETTINGS)
    assert len(result.positions.lengths) == 4
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_call_tells_how_to_go_on(hf_model, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    ids = torch.randint(4, 30, (6, 5), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        patch.setattr("infoflow_lens.probing.run.measure_parts", stopped)
        with pytest.raises(KeyboardInterrupt, match=r"run the same with out='.*' to go on"):
            probe(hf_model, ids, probes=("positions",), **SETTINGS)
    (kept,) = tmp_path.iterdir()
    result = probe(hf_model, ids, kept, probes=("positions",), **SETTINGS)
    assert result.out == kept


def test_it_shows_itself_briefly(found):
    assert len(repr(found)) < 500
    shown = found._repr_html_()
    assert len(shown) < 20_000
    assert "lies inside the predicted" in shown or "influence lies inside" in shown
    assert found.findings()[-1] == found.sentences()[-1]


def test_its_settings_are_those_of_the_command():
    shown = list(inspect.signature(probe).parameters)
    assert shown[:3] == ["model", "data", "out"]
    settings = set(ProbingConfig.__dataclass_fields__) - {"model", "data"}
    assert settings <= set(shown)
    assert inspect.signature(probe).parameters["batch_size"].default == 8


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (TEXTS, {"batchsize": 3}, "there is no setting 'batchsize'.* did you mean 'batch_size'"),
        (TEXTS, {"probes": ("positons",)}, "no probe 'positons'.* did you mean 'positions'"),
        ("w5 w7", {}, r"data is the text 'w5 w7': expected a list of texts, as in \[text\]"),
        ([], {}, r"data is \[\]: expected at least one"),
        (None, {}, "data is None"),
        (iter([TEXTS]), {}, "data is a loader, which may be read once only"),
        (TEXTS, {"dtype": "bfloat16"}, "dtype is 'torch.bfloat16', but"),
        (TEXTS, {"out": ""}, "out is '': expected a folder for results; give '.' for this one"),
    ],
)
def test_a_wrong_setting_or_data_is_refused_by_name(hf_model, data, settings, message):
    with pytest.raises(InfoFlowError, match=message):
        probe(hf_model, data, tokenizer=zoo.tokenizer(), **{**SETTINGS, **settings})


def test_hosted_models_and_loaded_ones(model, inputs):
    for given in (model, load_any(model)):
        result = probe(given, inputs, probes=("positions",), **SETTINGS)
        assert len(result.positions.lengths) == 23
        assert result.texts[0] == tuple("0123456")


def test_the_name_stays_a_function():
    import infoflow_lens.hooks.probe
    import infoflow_lens.probing.run

    assert infoflow_lens.probe is infoflow_lens.probing.run.probe


def test_data_that_are_not_there_are_refused_before_the_model_is_loaded(tmp_path):
    for missing in ("missing.txt", "ids.npy", "./folder"):
        with pytest.raises(InfoFlowError, match="there is no file"):
            probe("no/such/model", missing, tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_devices_and_number_types_of_pytorch_count_as_their_names(hf_model):
    settings = {**SETTINGS, "tokenizer": zoo.tokenizer(), "probes": ("positions",)}
    for given in ({"device": torch.device("cpu"), "dtype": torch.float32}, {"device": None}):
        config = probe(hf_model, TEXTS, **settings, **given).config
        assert (config.device, config.dtype) == ("cpu", "float32" if "dtype" in given else None)


def test_the_default_number_type_is_of_the_user(tmp_path):
    """Every part and the page under torch.set_default_dtype(float64)."""
    folder = zoo.save("gpt2", tmp_path / "gpt2", n_head=2)
    torch.set_default_dtype(torch.float64)
    try:
        found = probe(folder, TEXTS[:6], progress=False)
        assert found.report(tmp_path / "page.html").stat().st_size > 10_000
        assert found.influence.influence.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_by_name_is_probed_as_it_is(tmp_path):
    """By its own attention, on the tokens that its own tokenizer gives."""
    folder = zoo.save("gpt2", tmp_path / "gpt2")
    found = probe(folder, TEXTS, probes=("positions",), **SETTINGS)
    alone = zoo.build("gpt2")
    for index, text in enumerate(TEXTS[:6]):
        ids = torch.tensor([[2, *(int(word[1:]) for word in text.split())]])
        with torch.no_grad():
            patterns = alone(ids, output_attentions=True).attentions
        for ours, pattern in zip(found.positions.argmax, patterns, strict=True):
            chosen = ours[index, :, : ids.shape[1]]
            assert chosen.equal(pattern[0].argmax(-1).to(chosen.dtype))


def test_what_reads_the_next_token_is_refused_of_an_encoder_before_anything_is_measured(tmp_path):
    """Surveys of encoders ended there, when all else was measured."""
    bert, words = zoo.build("bert"), zoo.tokenizer()
    why = "top_k reads the loss of the next token, and queries of layer 0 attend to later keys"
    with pytest.raises(InfoFlowError, match=rf"^{why}.*Ask for positions$"):
        probe(bert, TEXTS, tokenizer=words, probes=("positions", "top_k"), **SETTINGS)
    said, loaded = [], load_any(bert, tokenizer=words)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    config = ProbingConfig("bert", str(data), probes=("positions", "top_k"), batch_size=4)
    found = run_probing(tmp_path / "out", config, False, said.append, loaded, if_possible=True)
    assert list(found.found) == ["positions"]
    assert sum(why in line for line in said) == 1

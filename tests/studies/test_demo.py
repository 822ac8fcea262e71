"""The demo end to end: small for its files, full size for its promises."""

import json

import pytest
import torch

from infoflow_lens import InfoFlowError, load_model
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.studies.demo import DemoConfig, run_demo
from infoflow_lens.training import evaluate
from tests.versions import same_release

SMALL = {
    "n_tokens": 6,
    "n_components": 3,
    "n_heads": (3, 1),
    "d_model": 12,
    "d_mlp": 16,
    "half_epochs": 2,
    "epochs": 3,
    "n_train": 256,
    "n_validation": 64,
    "n_recovery": 100,
    "n_influence": 30,
    "n_shown": 2,
}
METRICS = [
    "auroc",
    "average_precision",
    "precision",
    "recall",
    "jaccard",
    "exact_match",
    "influence_inside",
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo"), DemoConfig(seed=2, **SMALL), progress=False)


def test_the_summary_has_every_number(demo):
    summary = json.loads((demo.out / "summary.json").read_text())
    assert summary["task"]["name"] == "d_retrieval"
    assert summary["architecture"]["n_heads"] == [3, 1]
    assert summary["seed"] == 2
    assert same_release(summary["versions"]["torch"], torch.__version__)
    assert summary["nmse"] == demo.training.last.nmse
    for rank in ("rank1", "rank2"):
        for stage in ("initial", "trained"):
            heads = summary["recovery"][rank][stage]
            assert len(heads) == 3
            for head in heads:
                assert head["fvu"] >= head["second_moment"] > 0
    for stage in ("initial", "trained"):
        agreement = summary["agreement"][stage]
        assert len(agreement["layers"]) == 2
        for values in (*agreement["layers"], agreement["cls"]):
            for metric in METRICS:  # null where no state defines the metric
                assert values[metric] is None or 0 <= values[metric] <= 1
        assert 0 <= summary["coverage"][stage] <= 1


def test_it_trains_at_half_the_length_first(demo):
    assert [row["n_tokens"] for row in demo.training.history] == [3, 3, 6, 6, 6]
    assert DemoConfig(half_epochs=0).stages().lengths == ()
    assert DemoConfig(n_tokens=1, n_components=1).stages().lengths == ()


def test_the_trained_model_is_kept(demo):
    model = load_model(demo.out / "model")
    config = DemoConfig(seed=2, **SMALL)
    data = config.task().dataset("validation", 64, seed=2)
    assert evaluate(model, data) == pytest.approx(demo.training.last.nmse, rel=1e-5)


def test_the_same_seed_gives_the_same_files_whatever_the_threads(demo, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        again = run_demo(tmp_path, DemoConfig(seed=2, **SMALL), progress=False)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    for name in ("summary.json", "report.html"):
        assert (again.out / name).read_bytes() == (demo.out / name).read_bytes()


def test_a_folder_of_other_settings_is_refused(demo):
    with pytest.raises(InfoFlowError, match=r"settings \(seed\) changed"):
        run_demo(demo.out, DemoConfig(seed=3, **SMALL), progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"n_shown": 99, "n_influence": 9}, "n_shown is 99"),
        ({"n_heads": (3,)}, "one for each of two layers"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"n_recovery": 3}, "n_recovery is 3"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(InfoFlowError, match=message):
        DemoConfig(**settings)


def mean(heads):
    return sum(head["second_moment"] for head in heads) / len(heads)


@pytest.mark.acceptance
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_first_light_promises(seed, tmp_path):
    config = DemoConfig(seed=seed)
    summary = run_demo(tmp_path, config, progress=False).summary
    assert summary["nmse"] <= 3e-3
    recovery = summary["recovery"]
    assert mean(recovery["rank1"]["trained"]) <= 0.6 * mean(recovery["rank1"]["initial"])
    assert 0.8 <= mean(recovery["rank2"]["trained"]) / mean(recovery["rank2"]["initial"]) <= 1.15
    assert 0.3 <= summary["agreement"]["initial"]["cls"]["auroc"] <= 0.7
    assert summary["agreement"]["trained"]["cls"]["auroc"] >= 0.97
    assert summary["coverage"]["trained"] >= 0.95
    # four tokens, four heads that retrieve one each, in whichever layer
    mechanisms = measure_mechanisms(
        load_model(tmp_path / "model"), config.task().sample(300, seed=5)[0], progress=False
    ).mechanisms()
    assert sum(layer.count("max_position") for layer in mechanisms) == config.n_components

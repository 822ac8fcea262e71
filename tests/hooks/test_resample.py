"""Resample ablation against replacing tokens by hand, and on a target whose tokens are known."""

import pytest
import torch
from infoflow_lens.hooks import InfluenceResult

from infoflow_lens import (
    InfoFlowError,
    JacobianInfluence,
    ResampleInfluence,
    build_construction,
    run_probes,
)
from infoflow_lens.agreement import auroc


def by_hand(model, inputs, donors, name):
    """[donor, batch, pos, source], one replaced token at a time."""
    _, plain = model.run_with_cache(inputs)
    moved = []
    for donor in donors:
        columns = []
        for source in range(inputs.shape[1]):
            changed = inputs.clone()
            changed[:, source] = donor[source]
            _, cache = model.run_with_cache(changed)
            columns.append((cache[name] - plain[name]).norm(dim=-1))
        moved.append(torch.stack(columns, dim=-1))
    return torch.stack(moved).detach()


@pytest.mark.parametrize(
    ("aggregate", "join"),
    [
        ("median", lambda moved: moved.quantile(0.5, dim=0)),
        ("mean", lambda moved: moved.mean(dim=0)),
        (0.25, lambda moved: moved.quantile(0.25, dim=0)),
    ],
)
@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_it_is_the_change_of_the_state(
    model, inputs, token_model, token_inputs, aggregate, join, kind
):
    subject, data = (model, inputs) if kind == "vectors" else (token_model, token_inputs)
    probe = ResampleInfluence(data[:4], aggregate, chunk_size=17)
    (result,) = run_probes(subject, data[4:12], [probe], batch_size=3, progress=False)
    for layer in range(2):
        name = f"blocks.{layer}.hook_resid_mid"
        expected = join(by_hand(subject, data[4:12], data[:4], name))
        torch.testing.assert_close(result.influence[layer], expected, rtol=1e-4, atol=1e-5)


def test_neither_batches_nor_chunks_change_it(model, inputs):
    results = [
        run_probes(
            model,
            inputs[5:],
            [ResampleInfluence(inputs[:5], chunk_size=chunk)],
            batch_size=batch,
            progress=False,
        )[0].influence
        for batch, chunk in ((18, 4096), (4, 7))
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_the_future_has_no_influence_in_a_causal_model(token_model, token_inputs):
    probe = ResampleInfluence(token_inputs[:3], "mean", state="resid_post")
    (result,) = run_probes(token_model, token_inputs[3:], [probe], progress=False)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    assert result.influence[:, :, future].abs().max() < 1e-5
    assert result.influence[:, :, torch.eye(9, dtype=torch.bool)].min() > 0


def test_the_median_ranks_sources_as_the_jacobian_does_and_the_mean_does_not():
    """A donor may itself be the largest token: then every source seems to matter."""
    model, task = build_construction("d_retrieval", beta=30.0)
    x, _ = task.sample(60, seed=0)
    donors, _ = task.sample(8, seed=99)
    active = task.active_index_set(x)
    everything = torch.ones_like(active)
    scores = [
        float(auroc(result.influence[-1, :, -1], active, everything).nanmean())
        for result in run_probes(
            model,
            x,
            [
                JacobianInfluence(),
                ResampleInfluence(donors),
                ResampleInfluence(donors, 0.25),
                ResampleInfluence(donors, "mean"),
            ],
            progress=False,
        )
    ]
    jacobian, median, quarter, mean = scores
    assert jacobian > 0.99
    assert median >= 0.97
    assert quarter >= 0.99
    assert mean < median


def test_the_result_names_its_probe_and_donors(model, inputs, tmp_path):
    (result,) = run_probes(model, inputs[3:], [ResampleInfluence(inputs[:3])], progress=False)
    result.save(tmp_path / "influence")
    config = InfluenceResult.load(tmp_path / "influence").record.config
    assert config["probe"] == "ResampleInfluence"
    assert config["n_donors"] == 3
    assert config["donors"]
    assert result.sets(0.2).members.shape == (2, 20, 8, 7)
    assert "ResampleInfluence" in result.plot().layout.title.text


def test_probes_with_other_donors_cannot_be_merged(model, inputs):
    probes = [ResampleInfluence(inputs[:2]), ResampleInfluence(inputs[2:4])]
    run_probes(model, inputs, probes, progress=False)
    with pytest.raises(InfoFlowError, match="cannot merge"):
        probes[0].merge(probes[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"donors": torch.zeros(0, 7, 3)}, r"donors is \(0, 7, 3\)"),
        ({"donors": [[1, 2]]}, "donors is list"),
        ({"aggregate": "max"}, "aggregate is 'max'"),
        ({"aggregate": 1.5}, r"aggregate is 1\.5"),
        ({"aggregate": True}, "aggregate is True"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"state": "mlp_out"}, "state is 'mlp_out'"),
    ],
)
def test_bad_settings_are_named(inputs, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        ResampleInfluence(**({"donors": inputs} | arguments))


def test_donors_that_the_model_cannot_read_are_named(model, inputs, token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="sequences have 6 tokens"):
        run_probes(model, inputs, [ResampleInfluence(inputs[:, :6])], progress=False)
    with pytest.raises(InfoFlowError, match="donors have 8 positions, the sequences 9"):
        run_probes(
            token_model, token_inputs, [ResampleInfluence(token_inputs[:, :8])], progress=False
        )

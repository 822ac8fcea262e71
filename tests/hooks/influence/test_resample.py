"""Resample ablation against replacing tokens by hand, and on a target whose tokens are known."""

import pytest
import torch

from infoflow_lens import InfoFlowError, JacobianInfluence, attach, run_probes
from infoflow_lens.agreement import auroc
from infoflow_lens.hooks import InfluenceResult, ResampleInfluence
from infoflow_lens.hooks.model.points import starts_at_layers
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model
from tests.reference import families, zoo
from tests.versions import for_each


def by_hand(model, inputs, donors, name):
    """[donor, batch, pos, source], one replaced token at a time; NaN where none is replaced."""
    _, plain = model.run_with_cache(inputs)
    moved = []
    for donor in donors:
        columns = []
        for source in range(inputs.shape[1]):
            changed = inputs.clone()
            changed[:, source] = donor[source]
            _, cache = model.run_with_cache(changed)
            replaced = (changed != inputs).flatten(1).any(dim=1)
            gap = (cache[name] - plain[name]).norm(dim=-1)
            columns.append(gap.masked_fill(~replaced[:, None], torch.nan))
        moved.append(torch.stack(columns, dim=-1))
    return torch.stack(moved).detach()


AGGREGATED = {
    "median": lambda moved: moved.nanquantile(0.5, dim=0),
    "mean": lambda moved: moved.nanmean(dim=0),
    0.25: lambda moved: moved.nanquantile(0.25, dim=0),
}


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_it_is_the_change_of_the_state(model, inputs, token_model, token_inputs, kind):
    subject, data = (model, inputs) if kind == "vectors" else (token_model, token_inputs)
    probes = [ResampleInfluence(data[:4], aggregate, chunk_size=17) for aggregate in AGGREGATED]
    results = run_probes(subject, data[4:8], probes, batch_size=3, progress=False)
    for layer in range(2):
        moved = by_hand(subject, data[4:8], data[:4], f"blocks.{layer}.hook_resid_mid")
        for result, join in zip(results, AGGREGATED.values(), strict=True):
            torch.testing.assert_close(result.influence[layer], join(moved), rtol=1e-4, atol=1e-5)


def test_donors_with_the_token_that_stands_there_replace_nothing(token_model):
    """As where proteins or texts begin alike: the median over them was 0, and so no influence."""
    ids = torch.arange(9)[None] % 17
    donors = ids.repeat(3, 1)
    donors[2] = (donors[2] + 5) % 17  # one that differs, but at position 0, where none does
    donors[2, 0] = ids[0, 0]
    probe = ResampleInfluence(donors, state="resid_post")
    (result,) = run_probes(token_model, ids, [probe], progress=False)
    (expected,) = by_hand(token_model, ids, donors[2:], "blocks.1.hook_resid_post").nan_to_num(0)
    torch.testing.assert_close(result.influence[1], expected, rtol=1e-4, atol=1e-5)
    (note,) = result.notes
    assert "all donors have the sequence's own token at position 0: replaced by itself" in note


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
    assert "ResampleInfluence" in result.plot().get_suptitle()


def test_probes_with_other_donors_cannot_be_merged(model, inputs):
    probes = [ResampleInfluence(inputs[:2]), ResampleInfluence(inputs[2:4])]
    run_probes(model, inputs, probes, progress=False)
    with pytest.raises(InfoFlowError, match="cannot merge"):
        probes[0].merge(probes[1])


def test_donors_that_the_model_cannot_read_are_named(model, inputs, token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="6"):
        run_probes(model, inputs, [ResampleInfluence(inputs[:, :6])], progress=False)
    with pytest.raises(InfoFlowError, match="donors have 8 positions, the sequences 9"):
        run_probes(
            token_model, token_inputs, [ResampleInfluence(token_inputs[:, :8])], progress=False
        )
    with pytest.raises(InfoFlowError, match="0 to d_vocab - 1"):
        run_probes(token_model, token_inputs, [ResampleInfluence(token_inputs + 9)], progress=False)


# What is shared in causal models, and chosen states

SHARING = [
    {},
    {"attn_only": True},
    {"parallel_attn_mlp": True},
    {"n_key_value_heads": 2},
    {"positional_embedding_type": "rotary", "d_head": 6},
    {"positional_embedding_type": "alibi"},
    {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
    {"use_attention_sinks": True},
]
NOT_SHARING = [
    {"positional_embedding_type": "shortformer"},
    {"attention_dir": "bidirectional"},
]


def entering(model, ids):
    """The embedding with its position, by the model's own hook point."""
    name = "blocks.0.hook_resid_pre"
    return model.run_with_cache(ids, names_filter=name)[1][name].detach()


def after_first_block(model, ids, start):
    """The residual stream behind block 0, if this enters it."""
    name = "blocks.0.hook_resid_post"
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda activation, hook: start)]):
        return model.run_with_cache(ids, names_filter=name)[1][name]


def one_by_one(model, ids, donors, layer, source_layer=0):
    """[donor, batch, pos, source]: whole passes, with one position changed in each."""
    state, start = f"blocks.{layer}.hook_resid_post", f"blocks.{source_layer}.hook_resid_pre"
    cache = model.run_with_cache(ids)[1]
    plain, entering = cache[state], cache[start]
    donated = model.run_with_cache(donors)[1][start]
    moved = torch.empty(len(donors), *ids.shape, ids.shape[1])
    for donor in range(len(donors)):
        for source in range(ids.shape[1]):
            found = {}

            def replace(activation, hook, source=source, donor=donor):
                activation = activation.clone()
                activation[:, source] = donated[donor, source]
                return activation

            def catch(activation, hook, found=found):
                found["state"] = activation

            with torch.no_grad():
                model.run_with_hooks(ids, fwd_hooks=[(start, replace), (state, catch)])
            gap = (found["state"] - plain).norm(dim=-1)
            apart = (entering[:, source] - donated[donor, source]).norm(dim=-1)
            replaced = apart > 0
            moved[donor, :, :, source] = gap.masked_fill(~replaced[:, None], torch.nan)
    return moved.detach()


def counted(model):
    """Positions that pass through the first MLP or attention of the model, as they come."""
    lengths = []
    model.blocks[0].hook_resid_pre.add_perma_hook(
        lambda activation, hook: lengths.append(activation.shape[1])
    )
    return lengths


def test_from_a_layer_at_chosen_positions(token_inputs):
    model = make_token_model(n_layers=3)
    ids, donors = token_inputs[:3], token_inputs[5:8]
    probe = ResampleInfluence(
        donors, 0.25, state="resid_post", source_layer=1, layers=(2,), positions=(-2, 3)
    )
    (result,) = run_probes(model, ids, [probe], progress=False)
    assert result.positions.tolist() == [[7, 3]] * 3
    expected = one_by_one(model, ids, donors, 2, source_layer=1).nanquantile(0.25, dim=0)
    torch.testing.assert_close(result.influence[0], expected[:, [7, 3]], rtol=1e-5, atol=1e-5)
    assert result.influence[0, :, 0, 8].eq(0).all()


def test_a_pattern_that_knows_no_prefix_is_recomputed(token_model, token_inputs):
    """A permanent hook that needs square patterns: whole passes, and the right numbers."""

    def uniform(pattern, hook):
        if pattern.shape[-1] != pattern.shape[-2]:
            raise ValueError("expected a square pattern")
        allowed = torch.ones_like(pattern).tril()
        return allowed / allowed.sum(dim=-1, keepdim=True)

    for block in token_model.blocks:
        block.attn.hook_pattern.add_perma_hook(uniform)
    ids, donors = token_inputs[:3], token_inputs[5:8]
    (result,) = run_probes(
        token_model, ids, [ResampleInfluence(donors, state="resid_post")], progress=False
    )
    expected = one_by_one(token_model, ids, donors, 1).nanquantile(0.5, dim=0)
    torch.testing.assert_close(result.influence[1], expected, rtol=1e-5, atol=1e-5)


def test_a_pattern_that_is_wrong_with_a_prefix_is_recomputed(token_model, token_inputs):
    """It depends on how many queries there are, so a part of a pass is another pass."""

    def by_length(pattern, hook):
        return pattern / pattern.shape[-2]

    for block in token_model.blocks:
        block.attn.hook_pattern.add_perma_hook(by_length)
    ids, donors = token_inputs[:3], token_inputs[5:8]
    (result,) = run_probes(
        token_model, ids, [ResampleInfluence(donors, state="resid_post")], progress=False
    )
    expected = one_by_one(token_model, ids, donors, 1).nanquantile(0.5, dim=0)
    torch.testing.assert_close(result.influence[1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes", for_each([({},), ({"positional_embedding_type": "shortformer"},)])
)
def test_padded_sequences_are_as_alone(token_inputs, changes):
    model = make_token_model(**changes)
    sequences = [row[:length] for row, length in zip(token_inputs[:4], (9, 4, 6, 3), strict=True)]

    def make():
        return ResampleInfluence(token_inputs[8:13], state="resid_post", positions=(-1, 1))

    (together,) = run_probes(model, sequences, [make()], batch_size=3, progress=False)
    assert together.lengths.tolist() == [9, 4, 6, 3]
    for index, sequence in enumerate(sequences):
        (alone,) = run_probes(model, sequence[None], [make()], progress=False)
        n = len(sequence)
        torch.testing.assert_close(
            together.influence[:, index, :, :n], alone.influence[:, 0], rtol=1e-5, atol=1e-5
        )
        assert together.influence[:, index, :, n:].eq(0).all()


def test_donors_stand_where_the_tokens_stand():
    """GPT-2 counts padding on the left in its positions, and donors that run alone have none."""
    model, ids = families.build("gpt2"), families.tokens(9)
    mask = families.masks(ids)["left"]["attention_mask"]
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    donors = families.tokens(9).flip(0)
    refused = pytest.raises(InfoFlowError, match="donors would stand at other positions")
    with refused, attach(model, ResampleInfluence(donors)):
        model(ids, attention_mask=mask)
    with attach(model, ResampleInfluence(donors)) as probes:
        model(ids, attention_mask=mask, position_ids=places)
    (alone,) = run_probes(model, ids[1:, 3:], [ResampleInfluence(donors)], progress=False)
    found = probes.results()[0].influence
    torch.testing.assert_close(found[:, 1:, :6, :6], alone.influence, rtol=1e-4, atol=1e-5)


def test_half_precision_agrees_with_single(token_model, token_inputs):
    def measure():
        probe = ResampleInfluence(token_inputs[5:9], state="resid_post")
        return run_probes(token_model, token_inputs[:4], [probe], progress=False)[0]

    exact = measure()
    token_model.to(torch.bfloat16)
    found = measure()
    assert (found.influence - exact.influence).norm() < 0.05 * exact.influence.norm()
    assert "in bfloat16, a change of a state below 6.2% of its size is rounding" in found.notes[0]
    assert not exact.notes


@pytest.mark.parametrize("measure", [JacobianInfluence, ResampleInfluence])
def test_autocast_counts_as_half_precision(measure):
    """The states of the residual stream are float32 there, and what is added to them is not."""
    model, ids = families.build("llama"), families.tokens(9)
    settings = {"donors": ids.flip(0)} if measure is ResampleInfluence else {}
    (exact,) = run_probes(model, ids, [measure(**settings)], progress=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = run_probes(model, ids, [measure(**settings)], progress=False)
    assert (found.influence - exact.influence).norm() < 0.05 * exact.influence.norm()
    assert "in bfloat16" in found.notes[0]
    assert not exact.notes


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_bridges_run_whole(tmp_path, name):
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(
        str(zoo.save(name, tmp_path)), device="cpu", dtype=torch.float32
    )
    ids, donors = zoo.tokens(3, 7, seed=1), zoo.tokens(3, 8, seed=2)
    probe = ResampleInfluence(donors, state="resid_post", layers=(0,))
    (result,) = run_probes(
        model, [ids[0], ids[1, :4], ids[2, :6]], [probe], batch_size=3, progress=False
    )
    for index, length in enumerate((7, 4, 6)):
        alone = ids[index : index + 1, :length]
        expected = one_by_one(model, alone, donors[:, :length], 0).nanquantile(0.5, dim=0)[0]
        torch.testing.assert_close(
            result.influence[0, index, :length, :length], expected, rtol=1e-4, atol=1e-5
        )
        assert result.influence[0, index, length:].eq(0).all()


# Donors


def test_the_mean_token_of_the_donors(model, inputs, token_model, token_inputs):
    mean = inputs[5:].mean(dim=0, keepdim=True)
    by_mean, by_hand_made = run_probes(
        model,
        inputs[:4],
        [ResampleInfluence(inputs[5:], replacement="mean"), ResampleInfluence(mean)],
        progress=False,
    )
    torch.testing.assert_close(by_mean.influence, by_hand_made.influence, rtol=1e-5, atol=1e-6)
    assert by_mean.record.config["replacement"] == "mean"

    ids, donors = token_inputs[:3], token_inputs[5:]
    (result,) = run_probes(
        token_model,
        ids,
        [ResampleInfluence(donors, state="resid_post", replacement="mean")],
        progress=False,
    )
    start = entering(token_model, ids)
    mean = entering(token_model, donors).mean(dim=0)
    plain = after_first_block(token_model, ids, start)
    for source in (0, 6):
        changed = start.clone()
        changed[:, source] = mean[source]
        moved = after_first_block(token_model, ids, changed) - plain
        torch.testing.assert_close(
            result.influence[0, :, :, source],
            moved.norm(dim=-1).detach(),
            rtol=1e-5,
            atol=1e-5,
        )


def test_donors_run_once_for_all_batches(token_model, token_inputs):
    batches = []
    token_model.hook_embed.add_perma_hook(lambda activation, hook: batches.append(len(activation)))
    probe = ResampleInfluence(token_inputs[:4], positions=(-1,))
    run_probes(token_model, token_inputs[4:], [probe], batch_size=5, progress=False)
    if starts_at_layers(token_model):
        assert batches == [5, 4, 5, 5]
    else:  # whole passes with changed rows, too; the donors alone are four sequences
        assert batches.count(4) == 1


def test_longer_donors_give_their_first_positions(token_model, token_inputs):
    short = token_inputs[:3, :6]
    results = [
        run_probes(token_model, short, [ResampleInfluence(donors)], progress=False)[0]
        for donors in (token_inputs[5:9], token_inputs[5:9, :6])
    ]
    torch.testing.assert_close(*(result.influence for result in results))

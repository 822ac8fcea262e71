"""Jacobian influence equals PyTorch's own Jacobian, and finds what the model reads."""

import math
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from sklearn.metrics import roc_auc_score

from infoflow_lens import InfoFlowError, JacobianInfluence, attach, build_model, run_probes
from infoflow_lens.hooks import GradientTimesInput, InfluenceResult, ResampleInfluence
from infoflow_lens.hooks.influence.base import AskedStates, holding
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.theory import InformationSets
from tests.conftest import N_TOKENS, make_model_without_masks, make_token_model, some_of
from tests.reference import families, zoo
from tests.reference import transformer as reference
from tests.versions import for_each, needs_hooked_transformer


def norms(jacobian):
    """[pos, d_model, source, d_source] -> [pos, source]."""
    return jacobian.square().sum(dim=(1, 3)).sqrt()


def caught(model, names, ids, start=None, layer=0):
    """The sum of activations of one run, with gradients (a cache has none).

    Args:
        model, names: which, of what.
        ids: what the run reads.
        start: what enters the layer, in place of what would.
        layer: which.
    """
    found = {}

    def catch(name):
        return lambda activation, hook: found.update({name: activation})

    entry = f"blocks.{layer}.hook_resid_pre"
    entering = [] if start is None else [(entry, lambda activation, hook: start)]
    hooks = [(name, catch(name)) for name in names]
    model.run_with_hooks(ids, fwd_hooks=[*entering, *hooks])
    return sum(found[name] for name in names)


def test_equals_autograd_over_vector_tokens(model, inputs):
    kinds = ("post_attention", "resid_post")
    names = [f"{state}.{layer}" for state in kinds for layer in (0, 1)]
    weights = model.state_dict()
    probes = [JacobianInfluence(state=kind, chunk_size=n) for n in (5, None) for kind in kinds]
    results = run_probes(model, inputs[:3], probes, batch_size=2, progress=False)
    assert {result.influence.shape for result in results} == {(2, 3, N_TOKENS + 1, N_TOKENS)}

    def states(x):
        found = reference.forward(model.architecture, weights, x[None])
        return tuple(found[name][0] for name in names)

    for sample in range(3):
        jacobians = torch.autograd.functional.jacobian(states, inputs[sample], vectorize=True)
        expected = torch.stack([norms(jacobian) for jacobian in jacobians])
        for chunked in (results[:2], results[2:]):
            found = torch.cat([result.influence[:, sample] for result in chunked])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


KINDS = [
    {},
    {"attn_only": True},
    {"parallel_attn_mlp": True},
    {"n_key_value_heads": 2},
    {"positional_embedding_type": "rotary", "d_head": 6},
    {"positional_embedding_type": "alibi"},
    {"normalization_type": None},
]


@pytest.mark.parametrize("changes", for_each((kind,) for kind in KINDS))
def test_equals_autograd_over_embeddings(token_inputs, changes):
    model = make_token_model(**changes)
    (result,) = run_probes(model, token_inputs[:2], [JacobianInfluence()], progress=False)
    for sample in range(2):
        ids = token_inputs[sample : sample + 1]
        start = caught(model, ["blocks.0.hook_resid_pre"], ids)[0].detach()

        def states(resid, ids=ids):
            names = ["blocks.1.hook_resid_pre", "blocks.1.hook_attn_out"]
            return caught(model, names, ids, resid[None])[0]

        jacobian = torch.autograd.functional.jacobian(states, start)
        torch.testing.assert_close(
            result.influence[1, sample], norms(jacobian), rtol=1e-4, atol=1e-6
        )


def test_a_causal_model_has_no_influence_from_the_future(token_model, token_inputs):
    (result,) = run_probes(token_model, token_inputs, [JacobianInfluence()], progress=False)
    assert result.influence.triu(1).eq(0).all()
    assert result.influence.diagonal(dim1=-2, dim2=-1).gt(0).all()


def test_influence_between_layers(model, inputs):
    """From resid_pre of layer 1, CLS included, to the state after it."""
    probe = JacobianInfluence(state="resid_post", source_layer=1)
    (result,) = run_probes(model, inputs[:2], [probe], progress=False)
    assert result.layers == (1,)
    start = model(inputs[:2], stop_at_layer=1).detach()

    def states(resid):
        return model(resid[None], start_at_layer=1, stop_at_layer=2)[0]

    for sample in range(2):
        jacobian = torch.autograd.functional.jacobian(states, start[sample])
        torch.testing.assert_close(
            result.influence[0, sample], norms(jacobian), rtol=1e-5, atol=1e-6
        )
    assert result.influence[0, :, :N_TOKENS, N_TOKENS].eq(0).all()  # CLS is no key


def test_sets_hold_the_sources_above_a_share_of_the_largest(model, inputs):
    (result,) = run_probes(model, inputs, [JacobianInfluence()], progress=False)
    members = result.sets(0.4).members
    row = result.influence[1, 5, 2]
    expected = {s for s in range(N_TOKENS) if row[s] >= 0.4 * row.max()}
    assert result.sets(0.4).of(1, 5, 2) == expected
    assert (result.sets(0.7).members <= members).all()
    for threshold in (0.0, 1.5):
        with pytest.raises(InfoFlowError, match="threshold is"):
            result.sets(threshold)


def test_works_inside_the_users_inference_mode(model, inputs):
    with torch.inference_mode(), attach(model, JacobianInfluence()) as probes:
        model(inputs[:3])
    (outside,) = run_probes(model, inputs[:3], [JacobianInfluence()], progress=False)
    torch.testing.assert_close(probes[0].result().influence, outside.influence)


@pytest.mark.parametrize("settings", [{}, {"positions": (-1,)}, {"estimate": 4}])
def test_a_pass_that_cannot_be_repeated_is_refused(token_model, token_inputs, settings):
    """A mask is no part of what plain hooks see; one huge activation must not hide the others."""
    with torch.no_grad():
        token_model.embed.W_E[0, 0] = 3000.0
    token_inputs[:, 0] = 0
    mask = torch.ones_like(token_inputs)
    mask[:, :3] = 0
    probe = JacobianInfluence(**settings)
    with pytest.raises(InfoFlowError, match="attention_mask"):
        token_model.run_with_hooks(
            token_inputs, attention_mask=mask, fwd_hooks=probe.fwd_hooks(token_model)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_layer": 2}, "source_layer is 2"),
        ({"layers": (0, 2)}, r"layers are \[0, 2\]"),
        ({"source_layer": 1, "layers": (0,)}, r"layers are \[0\]: expected layers from 1"),
        ({"positions": (9,)}, r"positions are \[9\].* 9 positions"),
    ],
)
def test_what_is_not_there_is_named(token_model, token_inputs, arguments, message):
    with pytest.raises(InfoFlowError, match=message):
        run_probes(token_model, token_inputs, [JacobianInfluence(**arguments)], progress=False)


def test_positions_that_no_sequence_has_are_refused(model, inputs, token_model, token_inputs):
    """A model over vector tokens has CLS behind them; others have the tokens alone."""
    for over, x, n_pos in ((model, inputs, N_TOKENS + 1), (token_model, token_inputs[:, :6], 6)):
        for position in (n_pos, -n_pos - 1):
            with pytest.raises(
                InfoFlowError, match=rf"positions are \[{position}\].* {n_pos} positions"
            ):
                probed(over, x, positions=(position,))
        for position in (n_pos - 1, -n_pos):
            assert probed(over, x[:2], positions=(position,)).positions.ge(0).all()


def probed(model, data, **arguments):
    (result,) = run_probes(model, data, [JacobianInfluence(**arguments)], progress=False)
    return result


def embedding_jacobian(model, sequence, layer, position):
    """[source]: norms by one backward pass for every feature of a state."""
    ids = sequence[None]
    start = caught(model, ["blocks.0.hook_resid_pre"], ids).detach().requires_grad_()
    state = caught(model, [f"blocks.{layer}.hook_resid_post"], ids, start)[0, position]
    rows = [torch.autograd.grad(value, start, retain_graph=True)[0][0] for value in state]
    return torch.stack(rows).square().sum(dim=(0, 2)).sqrt()


def test_chosen_positions_and_layers(token_model, token_inputs):
    """Few states are differentiated backwards, all of them forwards: the same numbers."""
    chosen = {"positions": (-1, 2), "layers": (1,), "state": "resid_post"}
    result = probed(token_model, token_inputs[:4], **chosen)
    assert result.layers == (1,)
    assert result.influence.shape == (1, 4, 2, 9)
    assert result.positions.tolist() == [[8, 2]] * 4
    for sample in range(4):
        for row, position in enumerate((8, 2)):
            expected = embedding_jacobian(token_model, token_inputs[sample], 1, position)
            torch.testing.assert_close(
                result.influence[0, sample, row], expected, rtol=1e-4, atol=1e-6
            )
    full = result.full()
    assert full.shape == (1, 4, 9, 9)
    torch.testing.assert_close(full[:, :, 2], result.influence[:, :, 1])
    assert full[:, :, [0, 1, 3, 4, 5, 6, 7]].eq(0).all()
    sets = result.sets(0.3)
    assert sets.sizes()[:, :, [8, 2]].gt(0).all()
    assert sets.sizes().sum() == sets.sizes()[:, :, [8, 2]].sum()
    every = probed(token_model, token_inputs[:4], state="resid_post")
    assert (every.sets(0.3).members[1, :, [8, 2]] == sets.members[0, :, [8, 2]]).all()


def test_from_any_layer_to_any_layer():
    """Three layers: from what enters layer 1 to what leaves layers 2 and 1, in this order."""
    model = make_token_model(n_layers=3)
    ids = torch.arange(9)[None] % 17
    result = probed(model, ids, state="resid_post", source_layer=1, layers=(2, 1))
    start = caught(model, ["blocks.1.hook_resid_pre"], ids)[0].detach()
    for row, layer in enumerate((2, 1)):

        def states(resid, layer=layer):
            return caught(model, [f"blocks.{layer}.hook_resid_post"], ids, resid[None], 1)[0]

        jacobian = torch.autograd.functional.jacobian(states, start)
        torch.testing.assert_close(result.influence[row, 0], norms(jacobian), rtol=1e-4, atol=1e-6)


def test_the_first_position_is_one_of_all(model, inputs):
    some = probed(model, inputs[:5], positions=(0, -1))
    every = probed(model, inputs[:5])
    torch.testing.assert_close(some.full()[:, :, 0], every.influence[:, :, 0])
    assert some.has_scores.nonzero()[:, 1].tolist() == [0, N_TOKENS] * 5
    assert set(some.to_frame()["position"]) == {0, N_TOKENS}


def test_cls_can_be_asked_for_alone(model, inputs):
    last = probed(model, inputs[:5], positions=(-1,))
    every = probed(model, inputs[:5])
    assert last.positions.tolist() == [[N_TOKENS]] * 5
    assert last.full().shape == every.influence.shape
    torch.testing.assert_close(last.influence, every.influence[:, :, -1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("data", ["vectors", "tokens"])
def test_half_precision_agrees_with_single(model, inputs, token_model, token_inputs, data):
    subject, some = (model, inputs[:4]) if data == "vectors" else (token_model, token_inputs[:4])
    exact = probed(subject, some).influence
    subject.to(torch.bfloat16)
    rounded = some.bfloat16() if data == "vectors" else some
    for arguments in ({}, {"positions": (0, -1), "layers": (1,)}):
        result = probed(subject, rounded, **arguments)
        target = exact if not arguments else exact[1:, :, [0, -1]]
        assert result.influence.dtype == torch.float32
        # 4 units of bfloat16, whose last place is 2^-7
        assert "below 3.1% of the largest on the same state is rounding" in result.notes[0]
        assert (result.influence - target).norm() < 0.05 * target.norm()


# An estimate by random directions


def small_model():
    return make_token_model(d_model=32, d_head=8, n_ctx=12, d_vocab=40), torch.randint(
        40, (12, 12), generator=torch.Generator().manual_seed(0)
    )


def relative(estimated, exact):
    return float((estimated - exact).norm() / exact.norm())


def test_the_estimate_finds_the_exact_norms_and_says_how_closely():
    model, ids = small_model()
    exact = probed(model, ids).influence
    stated, found = [], []
    for m in (2, 8):
        results = [probed(model, ids, estimate=m, seed=seed) for seed in range(4)]
        error = [relative(result.influence, exact) for result in results]
        assert all(len(result.relative_error) == 2 for result in results)
        stated.append(sum(sum(result.relative_error) / 2 for result in results) / 4)
        found.append(sum(error) / 4)
        assert found[-1] < (1 / (2 * m)) ** 0.5
        assert any(
            f"influence is estimated by {m} random directions" in note for note in results[0].notes
        )
    for ours, theirs in zip(stated, found, strict=True):
        assert 1 < ours / theirs < 3.5  # a bound for 95% of draws, of errors of about half its size
    # sqrt(m), and a little more as the directions are orthogonal
    expected = math.sqrt(8 / 2 * (1 - 2 / 32) / (1 - 8 / 32))
    assert 0.8 * expected < found[0] / found[1] < 1.25 * expected


def test_the_estimate_ranks_sources_as_the_exact_norms_do():
    model, ids = small_model()
    exact = probed(model, ids, positions=(-1,)).influence[1, :, 0]
    estimated = probed(model, ids, positions=(-1,), estimate=8).influence[1, :, 0]
    top = exact >= exact.topk(3).values[:, -1:]
    aurocs = [roc_auc_score(t, e) for t, e in zip(top, estimated, strict=True)]
    assert sum(aurocs) / len(aurocs) >= 0.98


def test_all_directions_of_a_state_leave_no_error():
    model, ids = small_model()
    result = probed(model, ids[:3], estimate=100)
    torch.testing.assert_close(
        result.influence, probed(model, ids[:3]).influence, rtol=1e-4, atol=1e-6
    )
    assert result.relative_error == (0.0, 0.0)


def test_directions_depend_on_seed_layer_and_position_only():
    model, ids = small_model()
    together = probed(model, ids, estimate=3).influence
    (apart,) = run_probes(
        model, ids, [JacobianInfluence(estimate=3, chunk_size=2)], batch_size=5, progress=False
    )
    torch.testing.assert_close(apart.influence, together, rtol=1e-5, atol=1e-7)
    last = probed(model, ids, estimate=3, positions=(-1,)).influence
    torch.testing.assert_close(last, together[:, :, -1:], rtol=1e-5, atol=1e-7)
    other = probed(model, ids, estimate=3, seed=1).influence
    assert relative(other, together) > 0.02


def test_the_stated_error_covers_all_batches(tmp_path):
    model, ids = small_model()
    whole = probed(model, ids, estimate=4)
    (parts,) = run_probes(model, ids, [JacobianInfluence(estimate=4)], batch_size=5, progress=False)
    assert parts.relative_error == pytest.approx(whole.relative_error, rel=1e-4)
    whole.save(tmp_path / "estimate")
    assert InfluenceResult.load(tmp_path / "estimate").relative_error == whole.relative_error


# Sequences of different lengths, and other models


def ragged(tokens, lengths):
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def check_each_is_as_alone(model, sequences, make, tolerance=1e-5):
    """What a padded batch shows of a sequence is what the sequence alone shows."""
    (together,) = run_probes(model, sequences, [make()], batch_size=3, progress=False)
    assert together.lengths.tolist() == [len(sequence) for sequence in sequences]
    n_positions = max(len(sequence) for sequence in sequences)
    assert together.n_positions == n_positions
    for index, sequence in enumerate(sequences):
        (alone,) = run_probes(model, sequence[None], [make()], progress=False)
        n_rows, n_source = alone.influence.shape[2:]
        padded = torch.zeros_like(together.influence[:, index])
        padded[:, :n_rows, :n_source] = alone.influence[:, 0]
        assert alone.influence.gt(0).any(dim=-1).all()
        largest = float(alone.influence.max())
        torch.testing.assert_close(
            together.influence[:, index], padded, rtol=tolerance, atol=tolerance * largest
        )
        assert together.positions[index, :n_rows].tolist() == alone.positions[0].tolist()
        assert together.positions[index, n_rows:].eq(-1).all()
    return together


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"state": "resid_post", "positions": (-1, 0), "estimate": 3},
        {"state": "resid_post", "positions": (-2,), "layers": (1,), "source_layer": 1},
    ],
)
def test_padded_sequences_are_as_alone(token_model, token_inputs, arguments):
    sequences = ragged(token_inputs[:3], (9, 4, 6))
    together = check_each_is_as_alone(
        token_model, sequences, lambda: JacobianInfluence(**arguments)
    )
    frame = together.to_frame()
    rows = len(arguments.get("positions", ())) or None
    expected = sum((rows or length) * length for length in (9, 4, 6))
    assert len(frame) == expected * len(together.layers)
    assert (frame["influence"] >= 0).all()
    assert set(frame["layer"]) == set(together.layers)


def test_padding_on_the_left_is_left_out_too(token_model, token_inputs):
    (right,) = run_probes(
        token_model, ragged(token_inputs[:3], (9, 4, 6)), [JacobianInfluence()], progress=False
    )
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, length in enumerate((9, 4, 6)):
        ids[row, -length:] = token_inputs[row, :length]
        mask[row, -length:] = 1
    with attach(token_model, JacobianInfluence()) as probes:
        token_model(ids, attention_mask=mask)
    left = probes[0].result()
    torch.testing.assert_close(left.influence, right.influence, rtol=1e-4, atol=1e-5)
    assert left.lengths.tolist() == [9, 4, 6]


def test_a_position_that_some_sequences_lack(token_model, token_inputs):
    (result,) = run_probes(
        token_model,
        ragged(token_inputs[:3], (9, 4, 6)),
        [JacobianInfluence(positions=(5, 0))],
        progress=False,
    )
    assert result.positions.tolist() == [[5, 0], [-1, 0], [5, 0]]
    assert result.influence[:, 1, 0].eq(0).all()
    assert result.influence[:, [0, 2]].gt(0).any(dim=-1).all()
    assert "1 of 3 sequences have no position 5" in result.notes
    assert result.sets().members.shape == (2, 3, 9, 9)
    assert [a.get_title() for a in result.plot(sample=1).axes[:2]] == ["layer 0", "layer 1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_model_without_masks, "repeating the forward pass changes the state"),
        pytest.param(
            lambda: make_token_model(attention_dir="bidirectional"),
            "without padding",
            marks=needs_hooked_transformer,
        ),
    ],
)
def test_a_model_that_ignores_masks_takes_no_padding(token_inputs, make, message):
    model = make()
    mask = torch.ones_like(token_inputs)
    mask[0, :3] = 0
    with (
        attach(model, JacobianInfluence()),
        pytest.raises(InfoFlowError, match=message),
    ):
        model(token_inputs, attention_mask=mask)


@needs_hooked_transformer
def test_shortformer_runs_whole(token_inputs):
    """Its positions enter every layer aside of the residual stream, so no pass starts at one."""
    model = make_token_model(positional_embedding_type="shortformer")
    result = probed(model, token_inputs[:2], state="resid_post")
    for sample in range(2):
        start = model.embed(token_inputs[sample])
        positions = model.pos_embed(token_inputs[sample][None])

        def states(resid, positions=positions):
            resid = resid[None]
            for block in model.blocks:
                resid = block(resid, shortformer_pos_embed=positions)
            return resid[0]

        jacobian = torch.autograd.functional.jacobian(states, start.detach())
        torch.testing.assert_close(
            result.influence[1, sample], norms(jacobian), rtol=1e-4, atol=1e-6
        )


BRIDGES = ("gpt2", "llama", "bloom", "gpt_oss", "bert")  # bloom, gpt_oss: no forward mode


@pytest.fixture(scope="module")
def bridge_of(tmp_path_factory):
    from transformer_lens.model_bridge import TransformerBridge

    loaded = {}

    def get(name):
        if name not in loaded:
            folder = zoo.save(name, tmp_path_factory.mktemp(name))
            loaded[name] = TransformerBridge.boot_transformers(
                str(folder), device="cpu", dtype=torch.float32
            )
        return loaded[name]

    return get


def jacobian_of_plain_layer(name, ids):
    """[pos, source] of the first layer, from the model of transformers alone."""
    model = zoo.build(name)
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    seen = {}

    def enter(module, args, kwargs):
        if "start" not in seen:
            seen["start"] = (args[0] if args else kwargs["hidden_states"]).detach()
            seen["start"].requires_grad_()
        if args:
            return (seen["start"], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": seen["start"]}

    def leave(module, args, output):
        seen["end"] = output[0] if isinstance(output, tuple) else output

    layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    layers[0].register_forward_hook(leave)
    model(ids[None])
    rows = [
        torch.autograd.grad(value, seen["start"], retain_graph=True)[0][0].square().sum(dim=1)
        for value in seen["end"][0].flatten()
    ]
    return torch.stack(rows).view(len(ids), -1, len(ids)).sum(dim=1).sqrt()


@pytest.mark.parametrize("name", some_of(BRIDGES, "llama", "gpt_oss"))
def test_bridges_equal_autograd_through_the_plain_model(bridge_of, name):
    ids = zoo.tokens(1, 6)
    result = probed(bridge_of(name), ids, state="resid_post", layers=(0,))
    expected = jacobian_of_plain_layer(name, ids[0])
    torch.testing.assert_close(result.influence[0, 0], expected, rtol=1e-4, atol=1e-5)
    backward = any("no forward mode" in note for note in result.notes)
    assert backward == (name in ("bloom", "gpt_oss"))


@pytest.mark.parametrize("name", some_of(BRIDGES, "gpt_oss", "bert"))
def test_padded_bridges_are_as_alone(bridge_of, name):
    sequences = ragged(zoo.tokens(3, 8), (8, 4, 6))
    for arguments in ({}, {"positions": (-1,), "estimate": 3, "source_layer": 1}):
        check_each_is_as_alone(
            bridge_of(name), sequences, lambda given=arguments: JacobianInfluence(**given)
        )


# Sets by the share of influence that they hold


def fewest(row, share):
    """By adding the largest until they hold enough."""
    energy = [value**2 for value in row]
    order = sorted(range(len(row)), key=lambda source: (-energy[source], source))
    members, held = set(), 0.0
    for source in order:
        if energy[source] == 0 or held >= share * sum(energy) * (1 - 1e-12):
            break
        members.add(source)
        held += energy[source]
    return members


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_the_fewest_sources_that_hold_a_share(token_model, token_inputs, share):
    result = probed(token_model, token_inputs[:4])
    sets = result.sets_by_share(share)
    for layer in range(2):
        for sample in range(4):
            for position in range(9):
                row = result.influence[layer, sample, position].double().tolist()
                assert sets.of(layer, sample, position) == fewest(row, share)


def test_shares_of_equals_and_of_nothing():
    influence = torch.zeros(1, 1, 5, 5)
    influence[0, 0, 0] = 1.0
    influence[0, 0, 1, 3] = 7.0
    influence[0, 0, 2] = torch.tensor([1.0, 2.0, 2.0, 0.0, 1.0])

    def sets(share):
        return InformationSets(holding(influence, share))

    assert sets(0.8).of(0, 0, 0) == {0, 1, 2, 3}
    assert sets(0.8).of(0, 0, 1) == {3}
    assert sets(0.4).of(0, 0, 2) == {1}
    assert sets(0.8).of(0, 0, 2) == {1, 2}
    assert sets(0.9).of(0, 0, 2) == {0, 1, 2}
    assert sets(0.8).of(0, 0, 3) == set()
    for share in (0.0, 1.1):
        with pytest.raises(InfoFlowError, match="share is"):
            sets(share)


def test_rounding_is_no_influence(token_inputs):
    """A source whose influence is rounding beside the largest has none, so no rank or weight."""
    model = make_token_model()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(300)  # saturated: what is not chosen has a weight of about 0
    probes = [JacobianInfluence("resid_post"), ResampleInfluence(token_inputs[10:14])]
    for result in run_probes(model, token_inputs[:6], probes, progress=False):
        largest = result.influence.amax(dim=-1, keepdim=True)
        share = result.influence / largest
        assert ((share == 0) | (share > 4e-7)).all()
        assert (result.influence == 0).any()


@pytest.mark.slow
def test_the_stated_error_covers_the_true_one():
    """In 95% of 200 draws, for the numbers of directions and positions that are used."""
    model = make_token_model(d_model=24, d_head=6, n_ctx=9)
    x = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))
    for settings in ({"estimate": 4, "positions": (-1,)}, {"estimate": 8}):
        exact = {k: v for k, v in settings.items() if k != "estimate"}
        (truth,) = run_probes(model, x, [JacobianInfluence(**exact)], progress=False)
        probes = [JacobianInfluence(**settings, seed=seed) for seed in range(100)]
        covered = []
        for result in run_probes(model, x, probes, progress=False):
            gap = (result.influence - truth.influence).flatten(1).norm(dim=1)
            true = gap / truth.influence.flatten(1).norm(dim=1)
            covered += [e <= s for e, s in zip(true.tolist(), result.relative_error, strict=True)]
        assert len(covered) == 200
        assert sum(covered) / len(covered) >= 0.95


def test_the_stated_error_covers_that_of_states_that_move_in_few_directions():
    """As those of trained models do: 42% in one of 576, as in layer 14 of SmolLM2."""
    shares = torch.tensor([0.422, 0.045, 0.031, 0.025, 0.021, 0.017])
    rest = (-torch.arange(250) / 60).exp()
    energies = torch.cat([shares, (1 - shares.sum()) * rest / rest.sum()])

    class Linear(SimpleNamespace):
        def __call__(self, start):
            return (start * energies.sqrt(),)

    rerun, start = Linear(layers=(0,), real=None), torch.ones(1, 1, len(energies))
    states = AskedStates(start, list(rerun(start)), torch.zeros(1, 1).long())
    covered = []
    for seed in range(200):
        probe, errors = JacobianInfluence(estimate=8, seed=seed), torch.zeros(1, 2).double()
        norm = probe._reverse(rerun, states, 8, errors).sqrt().item()  # exactly, 1
        probe.kept |= {"errors": errors, "places": [states.place]}
        covered.append(abs(norm - 1) <= probe._relative_error()[0])
    assert sum(covered) / len(covered) >= 0.95


MISSING = [
    # how, which modules, what is said
    ("detached", "_proj", "cuts blocks.0.attn.hook_v, .*hook_z"),
    ("detached", "o_proj", "cuts blocks.0.hook_attn_out"),
    ("detached", "layers.1.mlp$", "cuts blocks.1.hook_mlp_out off"),
    ("detached", "layers.1.self_attn.v_proj", "cuts blocks.1.attn.hook_v off"),
    ("rounded", r"layers.\d.self_attn.o_proj", "derivative by all of them is 0"),
    ("int8", "", "quantized::linear_dynamic"),
    ("int8", r"layers.1.mlp.\w+_proj", "quantized::linear_dynamic"),
]


@pytest.mark.filterwarnings("ignore:quantized")
@pytest.mark.parametrize(("how", "where", "said"), MISSING)
def test_what_has_no_derivative_is_refused(how, where, said, monkeypatch):
    """Influence of other tokens was 0, or of a part of the model alone, in silence."""
    model, ids = zoo.build("llama"), torch.tensor([[5, 9, 7, 30], [8, 6, 40, 11]])
    chosen = {name: part for name, part in model.named_modules() if re.search(where, name)}
    if how == "int8":
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            pytest.skip("PyTorch has no packed int8 weights on this machine")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed = {name for name, part in chosen.items() if isinstance(part, torch.nn.Linear)}
            spec = dict.fromkeys(packed, torch.ao.quantization.default_dynamic_qconfig)
            model = torch.ao.quantization.quantize_dynamic(model, spec)
    else:
        for part in chosen.values():
            plain = part.forward
            gives = torch.detach if how == "detached" else lambda x: (x * 2**10).round() / 2**10
            monkeypatch.setattr(part, "forward", lambda x, f=plain, gives=gives: gives(f(x)))
    for measure in (
        JacobianInfluence("resid_post"),
        JacobianInfluence("resid_post", estimate=2, positions=(-1,)),
        GradientTimesInput("resid_post"),
    ):
        with pytest.raises(InfoFlowError, match=rf"{said}.*Resample"):
            run_probes(model, ids, [measure], progress=False)
    (found,) = run_probes(model, ids, [ResampleInfluence(ids.flip(0))], progress=False)
    assert float(found.influence[-1, 0, -1, :-1].min()) > 0


def test_a_mixer_that_is_cut_off_is_refused(monkeypatch):
    """Influence was that of what stands beside it, 0 of all other tokens."""
    model, ids = families.build("lfm2"), families.tokens()
    mixer = model.model.layers[0].conv
    plain = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda *args, **more: plain(*args, **more).detach())
    with pytest.raises(InfoFlowError, match=r"cuts blocks.0.hook_mixer_out off .*Resample"):
        run_probes(model, ids, [JacobianInfluence("resid_post")], progress=False)


def test_a_part_that_gives_a_constant_has_a_derivative(monkeypatch):
    """As of a model from which an MLP was taken out, or replaced by its mean."""
    model, ids = zoo.build("llama"), zoo.tokens(2, 5)
    mean = torch.ones(zoo.D_MODEL)
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda x: mean.expand_as(x))
    (found,) = run_probes(model, ids, [GradientTimesInput("resid_post")], progress=False)
    assert found.influence[:, :, -1].all()


@pytest.mark.parametrize("attention", ["softmax", "relu", "hardmax"])
def test_edges_and_jumps_are_no_missing_derivative(attention):
    """Of ReLU and hard maxima, at sharp scores and whatever the weights."""
    for seed in range(3):
        shape = Architecture((4, 4), 32, 2, 16, act_fn="relu", attention=attention)
        model = build_model(shape, seed=seed)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                weights *= 5 if name.endswith(("W_Q", "W_K")) else 1
        x = torch.randn(1, 16, 2, generator=torch.Generator().manual_seed(seed))
        (found,) = run_probes(model, x, [GradientTimesInput("resid_post")], progress=False)
        assert found.influence.any()

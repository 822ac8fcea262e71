"""Patterns idealised: definitions, damage by hand, and heads whose mechanism is known."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge

from infoflow_lens import InfoFlowError, PositionsProbe, propagate, run_probes
from infoflow_lens.hooks import AttendedProbe
from infoflow_lens.hooks.interventions.patterns import IDEALS, ideal_pattern, substituted
from infoflow_lens.hooks.mechanisms.measure import measure_mechanisms, replace_greedily
from infoflow_lens.models.host import build_token_model
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.theory.rules import MaxPosition
from tests.conftest import make_token_model, some_of, spread
from tests.reference import zoo
from tests.reference.induction import induction_model, repeated_segments
from tests.versions import needs_hooked_transformer, needs_version_4


def test_ideal_patterns_by_hand():
    pattern = torch.tensor([[[0.5, 0.2, 0.3], [0.1, 0.9, 0.0]]])
    allowed = torch.tensor([[[True, True, True], [True, True, False]]])
    mean = torch.tensor([[0.0, 1.0, 0.0], [0.4, 0.5, 0.1]])
    expected = {
        "own_position": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        "global": [[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]],
        "specific_position": [[0.0, 1.0, 0.0], [4 / 9, 5 / 9, 0.0]],
        "max_position": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        "top_k": [[0.625, 0.0, 0.375], [0.1, 0.9, 0.0]],
    }
    assert set(expected) == set(IDEALS)
    for ideal, rows in expected.items():
        made = ideal_pattern(pattern, allowed, ideal, mean, k=2)
        torch.testing.assert_close(made, torch.tensor([rows]))


@pytest.mark.parametrize("ideal", IDEALS)
def test_rows_keep_their_sums(ideal):
    """Also where they are not 1, as with sinks."""
    pattern, mean = torch.rand(2, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    made = ideal_pattern(pattern, torch.ones(2, 4, 5, dtype=torch.bool), ideal, mean, k=3)
    torch.testing.assert_close(made.sum(-1), pattern.sum(-1))


def test_a_substituted_head_is_replaced_and_the_others_are_not(token_model, token_inputs):
    model = token_model
    _, plain = model.run_with_cache(token_inputs)
    with substituted(model, {(0, 2): "max_position", (1, 1): "global"}):
        _, changed = model.run_with_cache(token_inputs)
    pattern, before = changed["pattern", 0], plain["pattern", 0]
    assert pattern[:, [0, 1, 3]].equal(before[:, [0, 1, 3]])
    assert pattern[:, 2].argmax(-1).equal(before[:, 2].argmax(-1))
    torch.testing.assert_close(pattern[:, 2].amax(-1), torch.ones(19, 9))
    evenly = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]  # no future
    torch.testing.assert_close(changed["pattern", 1][:, 1], evenly.expand(19, -1, -1))
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_damage_is_the_change_of_the_output_over_its_variance(model, inputs):
    result = measure_mechanisms(model, inputs, batch_size=5, progress=False)
    with torch.no_grad():
        output = model(inputs)
        for layer, head, ideal in ((0, 1, "global"), (1, 4, "max_position"), (1, 0, "top_k")):
            with substituted(model, {(layer, head): ideal}, k=4):
                changed = model(inputs)
            expected = (changed - output).square().sum() / (
                (output - output.mean(dim=0)).square().sum()
            )
            measured = result.damage[layer][head, IDEALS.index(ideal)]
            torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("metric", ["kl", "loss"])
def test_damage_of_logits_is_measured_in_nats(token_model, token_inputs, metric):
    result = measure_mechanisms(token_model, token_inputs, metric=metric, progress=False)
    with torch.no_grad():
        logits = token_model(token_inputs)
        with substituted(token_model, {(0, 3): "own_position"}):
            changed = token_model(token_inputs)
    if metric == "kl":
        p, q = logits.log_softmax(-1), changed.log_softmax(-1)
        expected = (p.exp() * (p - q)).sum(-1).mean()
    else:
        following = token_inputs[:, 1:, None]
        losses = [-x.log_softmax(-1)[:, :-1].gather(-1, following) for x in (changed, logits)]
        expected = (losses[0] - losses[1]).clamp(min=0).sum() / following.numel()
    measured = result.damage[0][3, IDEALS.index("own_position")]
    torch.testing.assert_close(measured, expected, rtol=1e-3, atol=1e-6)


def test_batch_size_changes_nothing(model, inputs):
    model.to(torch.float64, print_details=False)  # in float32 kernels round by the batch's size
    small, large = (
        measure_mechanisms(model, inputs.double(), batch_size=size, progress=False)
        for size in (4, 23)
    )
    for a, b in zip(small.damage, large.damage, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


BUILT = [
    ("d_retrieval", {}, {}, "max_position"),
    ("intrinsic_dimension", {}, {}, "max_position"),
    ("depth_separation", {"eps": 0.02}, {}, "max_position"),
    ("kth_largest", {"n_tokens": 8, "k": 3}, {}, "max_position"),
    ("position_sum", {}, {}, "specific_position"),
    ("global_mean", {}, {}, "global"),
]


@pytest.mark.parametrize(("name", "parameters", "settings", "mechanism"), BUILT)
def test_every_head_has_the_mechanism_that_it_was_built_for(name, parameters, settings, mechanism):
    model, task = build_construction(name, **parameters)
    result = measure_mechanisms(model, task.sample(40, seed=0)[0], progress=False, **settings)
    assert {name for layer in result.mechanisms() for name in layer} == {mechanism}
    joint = replace_greedily(model, task.sample(40, seed=1)[0], result, budget=0.05, progress=False)
    assert joint.share == 1
    assert joint.damage <= 0.05


def test_copying_is_by_position_and_matching_by_content():
    model, task = build_construction("in_context_qa_softmax", n_questions=6, n_answers=6, n_pairs=3)
    result = measure_mechanisms(
        model, task.sample(100, seed=0)[0], metric="nmse", read=(-1,), progress=False
    )
    assert result.mechanisms() == (("specific_position",), ("max_position",))


def test_an_induction_circuit_is_a_previous_token_head_and_a_matching_head():
    model = induction_model(n_vocab=11, n_ctx=9)
    tokens, _ = repeated_segments(11, 80)
    known = (6, 7)  # positions whose next token has been seen
    assert model(tokens)[:, known].argmax(-1).equal(tokens[:, 7:9])
    result = measure_mechanisms(model, tokens, read=known, progress=False)
    assert result.mechanisms() == (("specific_position",), ("max_position",))
    assert float(result.damage[1][0, IDEALS.index("specific_position")]) > 1  # nats


def test_rules_follow_the_mechanisms():
    """The previous token, then what follows its match: sets that are right by construction."""
    model = induction_model(n_vocab=11, n_ctx=9)
    tokens, starts = repeated_segments(11, 80)
    result = measure_mechanisms(model, tokens, read=(6, 7), progress=False)
    positions, attended = run_probes(
        model, tokens, [PositionsProbe(), AttendedProbe()], progress=False
    )
    sets = propagate(result.rules(attended.positions, positions.argmax))
    for row, start in enumerate(starts.tolist()):
        assert sets.of(0, row, 7) == {6, 7}
        for t in (6, 7):
            match = start + t - 6
            assert sets.of(1, row, t) == {t - 1, t, match, match + 1}


def test_rules_of_heads_by_position_hold_what_they_read():
    for name, size in (("global_mean", 16), ("position_sum", 3)):
        model, task = build_construction(name)
        x, _ = task.sample(40, seed=0)
        result = measure_mechanisms(model, x, progress=False)
        positions, attended = run_probes(
            model, x, [PositionsProbe(), AttendedProbe()], progress=False
        )
        sets = propagate(result.rules(attended.positions, positions.argmax), 16)
        assert sets.members[0, :, -1].sum(dim=1).eq(size).all()


OF_LENGTHS = ["global", "specific_position"], [True, False]


@pytest.mark.parametrize(
    ("ideal", "causal"),
    some_of(list(itertools.product(*OF_LENGTHS)), *spread(*OF_LENGTHS)),
)
def test_rules_of_texts_of_different_length_hold_no_padding(ideal, causal, hosted_over_ids):
    """Fixed keys of the long sequences are not there in the short ones."""
    model = make_token_model() if causal else hosted_over_ids
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(17, (n,), generator=generator) for n in (9, 4, 6)]
    found = measure_mechanisms(model, rows, progress=False)
    damage = torch.tensor([0.0 if name == ideal else math.inf for name in IDEALS])
    alike = dataclasses.replace(
        found, damage=tuple(damage.expand(len(layer), -1) for layer in found.damage)
    )
    positions, attended = run_probes(
        model, rows, [PositionsProbe(), AttendedProbe()], progress=False
    )
    sets = propagate(alike.rules(attended, positions))
    for sequence, row in enumerate(rows):
        for layer, t in itertools.product(range(2), range(len(row))):
            held = sets.of(layer, sequence, t)
            assert held <= set(range(len(row)))
            assert t == 0 or len(held) > 1
            if ideal == "global":
                assert held == set(range(t + 1 if causal else len(row)))


def test_heads_without_a_mechanism_stay_soft(model, inputs):
    result = measure_mechanisms(model, inputs, threshold=0.0, progress=False)
    assert {name for layer in result.mechanisms(0.0) for name in layer} == {"soft"}
    assert replace_greedily(model, inputs, result, budget=1.0, progress=False).share == 0
    assert {name for layer in result.mechanisms(1e9) for name in layer} == {"own_position"}
    rules = result.rules(
        [torch.zeros(23, h, 8, 8, dtype=torch.int64) for h in (2, 5)],
        [torch.zeros(23, h, 8, dtype=torch.int64) for h in (2, 5)],
    )
    assert [len(layer) for layer in rules] == [1 + 2, 1 + 5]
    assert all(isinstance(rule, MaxPosition) for layer in rules for rule in layer)


def test_rules_of_longer_sequences_and_in_the_other_order_are_refused(token_model, token_inputs):
    few = {"batch_size": 4, "progress": False}
    short = measure_mechanisms(token_model, token_inputs[:, :5], **few)
    positions, attended = run_probes(
        token_model, token_inputs, [PositionsProbe(), AttendedProbe()], progress=False
    )
    with pytest.raises(InfoFlowError, match="at most 5 positions, these sequences have 9"):
        short.rules(attended, positions)
    with pytest.raises(InfoFlowError, match="have 3 and 4 axes: expected 4 and 3"):
        short.rules(positions, attended)


def test_a_greedy_replacement_stays_within_its_budget(token_model, token_inputs):
    token_inputs = token_inputs[:7]
    result = measure_mechanisms(token_model, token_inputs, threshold=1e9, progress=False)
    free = replace_greedily(token_model, token_inputs, result, budget=1e9, progress=False)
    assert free.share == 1
    half = replace_greedily(
        token_model, token_inputs, result, budget=free.damage / 2, progress=False
    )
    assert half.damage <= free.damage / 2
    assert 0 < half.share < 1


def test_the_model_is_left_as_it_was_found(token_model, token_inputs):
    model = token_model.train()
    seen = []
    model.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: seen.append(0))
    before = copy.deepcopy(model.state_dict())
    measure_mechanisms(model, token_inputs, progress=False)
    assert model.training
    assert len(model.hook_dict["blocks.0.attn.hook_pattern"].fwd_hooks) == 1
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


def test_the_result_is_saved_and_shown(model, inputs, tmp_path):
    result = measure_mechanisms(model, inputs, progress=False)
    result.save(tmp_path / "mechanisms")
    loaded = type(result).load(tmp_path / "mechanisms")
    assert loaded.mechanisms() == result.mechanisms()
    frame = loaded.to_frame()
    assert len(frame) == 7
    behind = [prefix + ideal for prefix in ("error_", "sufficient_") for ideal in IDEALS]
    assert list(frame.columns) == ["layer", "head", "mechanism", *IDEALS, *behind]
    assert result.plot().axes[0].get_xlabel() == "ideal"


def test_bad_substitutions_are_named(token_model, model, inputs):
    for heads, message in (
        ({(2, 0): "global"}, "no head 0 in layer 2"),
        ({(0, 4): "global"}, "no head 4 in layer 0"),
        ({(0, 0): "hard"}, "ideal is 'hard'"),
        ({(0, 0): "max_positions"}, "did you mean 'max_position'"),
        ({(0, 0): "specific_position"}, "needs the mean patterns"),
    ):
        with pytest.raises(InfoFlowError, match=message), substituted(token_model, heads):
            pass
    with pytest.raises(InfoFlowError, match="compares distributions, and the model"):
        measure_mechanisms(model, inputs, metric="kl", progress=False)
    with pytest.raises(InfoFlowError, match="the same for all inputs"):
        measure_mechanisms(model, inputs[:1].expand(4, -1, -1), progress=False)
    with pytest.raises(InfoFlowError, match="Linear does not run on an example"):
        measure_mechanisms(torch.nn.Linear(2, 2), inputs, progress=False)
    with pytest.raises(InfoFlowError, match="metric 'loss' is over all next tokens"):
        measure_mechanisms(token_model, torch.ones(2, 3).long(), metric="loss", read=(1,))


def test_bfloat16_models_can_be_asked(token_inputs):
    model = make_token_model().to(torch.bfloat16, print_details=False)
    result = measure_mechanisms(model, token_inputs, progress=False)
    assert all(layer.isfinite().all() for layer in result.damage)


@pytest.mark.parametrize(
    ("batch_size", "metric"),
    some_of(list(itertools.product([1, 4], ["kl", "loss"])), (4, "loss")),
)
def test_padding_changes_nothing(batch_size, metric):
    """The damage is the mean over tokens, so one run of each sequence adds up to it."""
    model, lengths = make_token_model(), (9, 4, 6, 2)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(17, (n,), generator=generator) for n in lengths]
    found = measure_mechanisms(
        model, sequences, metric=metric, batch_size=batch_size, progress=False
    )
    places = (2, 1, IDEALS.index("max_position"))
    expected = n = 0.0
    for sequence in sequences:
        alone = measure_mechanisms(model, sequence[None], metric=metric, progress=False)
        weight = len(sequence) - (metric == "loss")
        expected += float(alone.damage[1][places[1], places[2]]) * weight
        n += weight
    assert float(found.damage[1][places[1], places[2]]) == pytest.approx(expected / n, rel=1e-4)
    patterns = [
        model.run_with_cache(sequence[None])[1]["blocks.1.attn.hook_pattern"][0, 2]
        for sequence in sequences
    ]
    for query in range(9):
        rows = [pattern[query] for pattern in patterns if len(pattern) > query]
        mean = torch.stack([torch.nn.functional.pad(r, (0, 9 - len(r))) for r in rows]).mean(0)
        torch.testing.assert_close(found.mean_patterns[1][2, query], mean, atol=1e-6, rtol=0)


def test_the_last_token_of_each_sequence_can_be_read():
    model = make_token_model()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(17, (n,), generator=generator) for n in (9, 4, 6)]
    settings = {"read": (-1,), "progress": False}
    found = measure_mechanisms(model, sequences, **settings)
    alone = [measure_mechanisms(model, s[None], **settings).damage[0][:, 1] for s in sequences]
    torch.testing.assert_close(found.damage[0][:, 1], torch.stack(alone).mean(0))


def test_an_interrupted_measurement_goes_on(token_model, token_inputs):
    """From every state that it was left in, and the states do not move; for any threshold."""
    settings = {"batch_size": 3, "progress": False}
    reached = []
    whole = measure_mechanisms(token_model, token_inputs, after=reached.append, **settings)
    assert len(reached) > 6
    for state in reached[1::4]:
        before = copy.deepcopy(state)
        resumed = measure_mechanisms(
            token_model, token_inputs, resume=state, threshold=0.01, **settings
        )
        for one, other in zip(resumed.damage, whole.damage, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
        assert resumed.mechanisms() == whole.mechanisms(0.01)
        assert str(before) == str(state)
    for model, other in ((token_model, {"k": 2}), (make_token_model(d_mlp=7), {})):
        with pytest.raises(InfoFlowError, match="resume is of another run"):
            measure_mechanisms(model, token_inputs, resume=reached[0], **{**settings, **other})


@pytest.mark.parametrize(
    "name", some_of(["gpt2", "llama", "mistral", "gpt_neox", "gpt_oss"], "gpt_neox", "gpt_oss")
)
def test_bridges_whose_patterns_can_be_edited(tmp_path, name):
    """The damage of one replacement, by plain hooks on the bridge."""
    from transformer_lens.model_bridge import TransformerBridge

    zoo.save(name, tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path), device="cpu", dtype=torch.float32)
    ids = torch.randint(20, (5, 8), generator=torch.Generator().manual_seed(0))
    found = measure_mechanisms(model, ids, progress=False)
    with torch.no_grad():
        before = model(ids).double().log_softmax(-1)

        def argmax(pattern, hook):
            pattern = pattern.clone()
            rows = pattern[:, 1]
            one = torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1])
            pattern[:, 1] = one * rows.sum(-1, keepdim=True)
            return pattern

        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", argmax)]):
            after = model(ids).double().log_softmax(-1)
    expected = float((before.exp() * (before - after)).sum(-1).mean())
    place = IDEALS.index("max_position")
    assert float(found.damage[0][1, place]) == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert expected > 1e-9


@pytest.mark.parametrize("name", some_of(["opt", "bert", "gptj", "gpt_neo"], "bert", "gptj"))
def test_bridges_whose_patterns_cannot_be_edited_are_refused(tmp_path, name):
    from transformer_lens.model_bridge import TransformerBridge

    zoo.save(name, tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path), device="cpu", dtype=torch.float32)
    with pytest.raises(InfoFlowError, match="pattern of layer 0 do not reach the output"):
        measure_mechanisms(model, torch.randint(20, (5, 8)), progress=False)


def test_of_heads_that_write_nothing_the_bridge_alone_is_not_blamed(tmp_path):
    zoo.save("gpt2", tmp_path)
    model = TransformerBridge.boot_transformers(str(tmp_path), device="cpu", dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(InfoFlowError, match="or the heads of that layer write nothing"):
        measure_mechanisms(model, torch.randint(20, (5, 8)), progress=False)


def native_twin(hosted):
    """A native bridge with the weights of a hosted attention-only model over token ids."""
    sizes = hosted.architecture
    config = TransformerBridgeConfig(
        n_layers=sizes.n_layers, n_heads=sizes.n_heads[0], d_head=sizes.d_head,
        d_model=sizes.d_model, n_ctx=sizes.n_tokens, d_vocab=sizes.d_vocab,
        d_vocab_out=sizes.d_output, attn_only=True, normalization_type=None, act_fn="gelu",
        attention_dir="bidirectional",
    )  # fmt: skip
    with torch.random.fork_rng():
        twin = TransformerBridge.boot_native(config)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.embed.W_E.copy_(hosted.W_E)
        twin.pos_embed.W_pos.copy_(hosted.W_pos)
        twin.unembed.W_U.copy_(hosted.W_U)
        for block, other in zip(hosted.blocks, twin.blocks, strict=True):
            other.attn.W_Q.copy_(block.attn.W_Q * sizes.d_head**0.5)  # it divides by the root
            for name in ("W_K", "W_V", "W_O"):
                getattr(other.attn, name).copy_(getattr(block.attn, name))
    return twin


@pytest.fixture
def hosted_over_ids():
    """Sharp enough for weights that underflow to 0, which are no masked keys."""
    model = build_token_model(
        n_layers=2, n_heads=3, d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17,
        attention="softmax", seed=3,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "W_" in name:
                parameter.mul_(2)
    return model


@needs_version_4
@pytest.mark.parametrize("metric", ["kl", "nmse"])
def test_a_native_bridge_has_the_damages_of_the_hosted_model(hosted_over_ids, token_inputs, metric):
    twin = native_twin(hosted_over_ids)
    _, cache = hosted_over_ids.run_with_cache(token_inputs)
    assert (cache["pattern", 1] == 0).any()
    output = hosted_over_ids(token_inputs)
    torch.testing.assert_close(twin(token_inputs), output, rtol=1e-4, atol=1e-4)
    found, expected = (
        measure_mechanisms(model, token_inputs, metric=metric, progress=False)
        for model in (twin, hosted_over_ids)
    )
    for one, other in zip(found.damage, expected.damage, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for one, other in zip(found.mean_patterns, expected.mean_patterns, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert found.mechanisms() == expected.mechanisms()
    assert len({name for layer in expected.mechanisms() for name in layer}) > 1


@needs_hooked_transformer
def test_a_native_bridge_of_version_3_is_refused(hosted_over_ids, token_inputs):
    """It has used its pattern when the hook fires."""
    with pytest.raises(InfoFlowError, match="pattern of layer 0 do not reach the output"):
        measure_mechanisms(native_twin(hosted_over_ids), token_inputs, progress=False)

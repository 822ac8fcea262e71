"""What labels predict: sets that are right by construction, of heads whose mechanism is known."""

import dataclasses
import itertools

import pytest
import torch

from infoflow_lens import InfoFlowError, PositionsProbe, label_heads, propagate, run_probes
from infoflow_lens.hooks import AttendedProbe, GradedSetsProbe
from infoflow_lens.studies.constructions import build_construction
from tests.conftest import make_token_model
from tests.reference.induction import induction_model, repeated_segments


def keys_of(model, inputs):
    probes = [AttendedProbe(), PositionsProbe((1, 2, 3))]
    return run_probes(model, inputs, probes, progress=False)


MAX, FIXED = {"largest", "gated"}, {"position", "offset"}
BUILT = [
    ("d_retrieval", {}, "max", MAX),
    pytest.param("intrinsic_dimension", {}, "max", MAX, marks=pytest.mark.slow),
    # a few texts lose so much by a fixed pattern that its share is known to within itself
    pytest.param("depth_separation", {"eps": 0.02}, None, MAX, marks=pytest.mark.slow),
    # whose hard heads have no gradient, so that estimates call every ideal enough
    ("kth_largest", {"n_tokens": 8, "k": 3}, "max", MAX),
    ("position_sum", {}, "fixed: position", FIXED),
    ("global_mean", {}, "fixed: even", FIXED),
]


@pytest.mark.parametrize(("name", "parameters", "mechanism", "family"), BUILT)
def test_every_head_has_the_label_that_it_was_built_for(name, parameters, mechanism, family):
    model, task = build_construction(name, **parameters)
    found = label_heads(model, task.sample(100, seed=0)[0], progress=False)
    if mechanism is not None:
        assert {name for layer in found.mechanisms for name in layer} == {mechanism}
    assert set(found.replacements) <= family
    assert float(found.damage[found.assignments.index("each head by its label")]) < 0.05


@pytest.mark.parametrize(("name", "size"), [("global_mean", 16), ("position_sum", 3)])
def test_heads_by_position_pass_on_what_they_read(name, size):
    model, task = build_construction(name)
    x, _ = task.sample(40, seed=0)
    found = label_heads(model, x, progress=False)
    sets = propagate(found.rules(*keys_of(model, x)), 16)
    assert sets.members[0, :, -1].sum(dim=1).eq(size).all()


@pytest.fixture(scope="module")
def circuit():
    model = induction_model(n_vocab=11, n_ctx=9)
    tokens, starts = repeated_segments(11, 80)
    return model, tokens, starts, label_heads(model, tokens, read=(6, 7), progress=False)


def test_an_induction_circuit_is_a_previous_token_head_and_a_matching_head(circuit):
    """The previous token, then what follows its match."""
    model, tokens, starts, found = circuit
    assert found.mechanisms == (("fixed: previous",), ("max",))
    sets = propagate(found.rules(*keys_of(model, tokens)))
    for row, start in enumerate(starts.tolist()):
        assert sets.of(0, row, 7) == {6, 7}
        for t in (6, 7):
            match = start + t - 6
            assert {t - 1, t, match, match + 1} <= sets.of(1, row, t) <= {
                0, t - 1, t, match, match + 1
            }  # fmt: skip


def test_graded_sets_weigh_heads_by_what_the_output_loses_without_them(circuit):
    model, tokens, _, found = circuit
    lost = found.lost()
    assert all((layer > 0).all() for layer in lost)
    results = [
        run_probes(model, tokens, [GradedSetsProbe("damage", damage=given)], progress=False)[0]
        for given in (found, [layer.tolist() for layer in lost])
    ]
    assert results[0].full().equal(results[1].full())


@pytest.fixture(scope="module")
def of_different_length():
    """A model, texts, and what its heads are called by them."""
    model = make_token_model()
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(17, (n,), generator=generator) for n in (9, 4, 6, 9)]
    return model, rows, label_heads(model, rows, worthiest=0, progress=False)


@pytest.mark.parametrize("replacement", ["position", "gated", "top 2", "idle"])
def test_texts_of_different_length_hold_what_their_ideal_reads_and_no_padding(
    replacement, of_different_length
):
    model, rows, found = of_different_length
    n = len(found.labels)
    label, name = {"top 2": ("several", "top 2")}.get(replacement, ("fixed", ""))
    alike = dataclasses.replace(
        found,
        labels=(label,) * n,
        names=(name,) * n,
        replacements=(replacement,) * n,
        idle=torch.full((n,), replacement == "idle"),
        mean_patterns=tuple(mean.gt(0).float() for mean in found.mean_patterns),
    )
    attended, positions = keys_of(model, rows)
    rules = alike.rules(attended, positions)
    assert [len(layer) for layer in rules] == [len(mean) for mean in found.mean_patterns]
    sets = propagate(rules)
    for sequence, row in enumerate(rows):
        ranked = positions.positions[0][sequence]
        for t in range(len(row)):
            if replacement == "position":
                expected = set(range(t + 1))
            elif replacement == "idle":
                expected = {t}
            elif replacement == "top 2":
                expected = {t, *ranked[:, t, :2].flatten().tolist()} - {-1}
            else:
                expected = {0, t}
                for keys in ranked[:, t].tolist():
                    expected |= {next((key for key in keys if key > 0), 0)}
            assert sets.of(0, sequence, t) == expected
        for t in range(len(row)):
            assert sets.of(1, sequence, t) <= set(range(t + 1))


def test_idle_heads_of_a_model_without_next_tokens_do_little_damage_together():
    """The construction for three parts has heads to spare where one part alone counts."""
    model, task = build_construction("d_retrieval")
    x, _ = task.sample(60, seed=0)
    with torch.no_grad():
        model.blocks[0].attn.W_O[1:] = 0
    found = label_heads(model, x, progress=False)
    assert found.idle.tolist() == [head > 0 for _, head in found.heads.tolist()]
    assert {*found.mechanisms[0][1:]} == {"idle"}
    assert found.lost()[0][1:].eq(0).all()


def test_keys_of_longer_texts_and_in_the_other_order_are_refused(circuit):
    model, tokens, _, found = circuit
    attended, positions = keys_of(model, tokens)
    with pytest.raises(InfoFlowError, match="results of AttendedProbe and PositionsProbe, in"):
        found.rules(positions, attended)
    short = label_heads(model, tokens[:, :8], read=(6,), progress=False)
    with pytest.raises(InfoFlowError, match="at most 8 positions, these sequences have 9"):
        short.rules(attended, positions)
    twice = [torch.cat([keys, keys], dim=1) for keys in attended.positions]  # another model's
    with pytest.raises(InfoFlowError, match=r"keys of layers with \[2, 2\]: expected both"):
        found.rules(twice, positions)
    with pytest.raises(InfoFlowError, match=r"chosen keys of .*: expected both of one model"):
        found.rules(attended, positions.positions[:1])


def test_labels_are_listed_by_layer(circuit):
    _, _, _, found = circuit
    for layer, names in enumerate(found.mechanisms):
        for head, name in enumerate(names):
            assert name in ("idle", found.label_of(layer, head))
    assert list(itertools.chain(*found.lost())) == pytest.approx(
        found.worth.clamp(min=0).masked_fill(found.idle, 0).tolist()
    )

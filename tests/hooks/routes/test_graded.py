"""Graded sets of models against all their paths, and edges against the paths that use them."""

import itertools

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, attach, build_model, propagate, run_probes
from infoflow_lens.hooks import GradedSetsProbe, GradedSetsResult, PatternsProbe, measure_mechanisms
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.theory.propagation import BEST, add_own, propagate_back, propagate_edges
from tests.conftest import make_token_model
from tests.reference import routes

PATHS = ("product", "weakest")
LOST = ((0.5, 0.0, 2.0, 1.0), (0.0, 0.25, 0.0, 0.0))


def strengths_by_hand(model, x, sequence, strength):
    """For every layer [head, query, key], from a cache."""
    _, cache = model.run_with_cache(x)
    found = []
    for layer, block in enumerate(model.blocks):
        weights = cache["pattern", layer][sequence].double()
        if strength == "damage":
            weights = weights * torch.tensor(LOST[layer])[:, None, None] / 2
        if strength == "norm":
            values = cache["v", layer][sequence].double()  # [key, head, d_head]
            output = block.attn.W_O.detach().double()
            before = cache["resid_pre", layer][sequence].double()
            for head, query, key in np.ndindex(*weights.shape):
                part = weights[head, query, key] * (values[key, head] @ output[head])
                weights[head, query, key] = min(1, part.norm() / before[query].norm())
        found.append(weights.tolist())
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strength", ["weight", "norm", "damage"])
def test_scores_are_the_best_of_all_paths_through_heads_and_positions(strength, path):
    model = make_token_model()
    x = torch.randint(17, (2, 4), generator=torch.Generator().manual_seed(0))
    more = {"damage": LOST} if strength == "damage" else {}
    (found,) = run_probes(model, x, [GradedSetsProbe(strength, path, **more)], progress=False)
    for sequence in range(2):
        layers = strengths_by_hand(model, x, sequence, strength)
        for layer, state, source in itertools.product(range(2), range(4), range(4)):
            expected = routes.best_path(layers[: layer + 1], state, source, path)
            assert abs(float(found.scores[layer, sequence, state, source]) - expected) < 1e-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attention", ["softmax", "relu", "hardmax"])
def test_by_weight_they_are_what_theory_makes_of_the_patterns(attention, path):
    """CLS holds nothing of its own; rows of ReLU attention that sum to more than 1 are shares."""
    sizes = {"n_heads": (2, 3), "d_model": 12, "d_token": 3, "n_tokens": 7}
    model = build_model(Architecture(**sizes, attention=attention), seed=0)
    x = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0)) * 9
    probes = [GradedSetsProbe(path=path), PatternsProbe()]
    found, patterns = run_probes(model, x, probes, progress=False)
    weights = [p / p.sum(dim=-1, keepdim=True).clamp(min=1) for p in patterns.patterns]
    graded = propagate(strength=weights, n_sources=7, path=path)
    assert found.scores.equal(graded.strengths)
    assert found.graded().strengths.equal(graded.strengths)
    assert found.graded().at().members.equal(graded.at().members)


def test_sequences_of_different_length_are_those_alone(token_model, token_inputs):
    lengths = (9, 4, 6)
    rows = [row[:n] for row, n in zip(token_inputs, lengths, strict=False)]
    (together,) = run_probes(token_model, rows, [GradedSetsProbe()], progress=False)
    graded = together.graded()
    assert graded.lengths.tolist() == list(lengths)
    for index, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        (alone,) = run_probes(token_model, row[None], [GradedSetsProbe()], progress=False)
        own = graded.strengths[:, index, :n, :n]
        torch.testing.assert_close(own, alone.scores[:, 0], atol=1e-6, rtol=1e-5)
        assert not graded.strengths[:, index, n:].any()
        assert not graded.strengths[:, index, :, n:].any()


def test_heads_that_the_output_does_not_need_move_nothing(token_model, token_inputs):
    """Of measured mechanisms: without them each state keeps to itself."""
    x = token_inputs[:6]
    settings = {"metric": "kl", "progress": False}
    measured = measure_mechanisms(token_model, x, threshold=0.0, **settings)
    lost = measured.lost()
    for damage, by_head in zip(measured.damage, lost, strict=True):
        assert by_head.equal(damage[:, measured.ideals.index("own_position")])
    probes = [GradedSetsProbe("damage", damage=measured), GradedSetsProbe("damage", damage=lost)]
    one, other = run_probes(token_model, x, probes, progress=False)
    assert one.scores.equal(other.scores)
    needless = measure_mechanisms(token_model, x, threshold=1e9, **settings)
    assert not torch.cat(needless.lost()).any()
    (alone,) = run_probes(
        token_model, x, [GradedSetsProbe("damage", damage=needless)], progress=False
    )
    assert alone.scores.equal(torch.eye(9).expand_as(alone.scores))


def test_its_result_is_saved_and_says_how_it_was_made(token_model, token_inputs, tmp_path):
    probe = GradedSetsProbe("damage", "weakest", damage=LOST, positions=(-1,))
    (found,) = run_probes(token_model, token_inputs[:2], [probe], progress=False)
    found.save(tmp_path / "graded")
    loaded = GradedSetsResult.load(tmp_path / "graded")
    assert loaded.graded().strengths.equal(found.graded().strengths)
    config = loaded.record.config
    assert (config["strength"], config["path"]) == ("damage", "weakest")
    assert config["damage"] == [list(heads) for heads in LOST]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": "value"}, "strength is 'value'"),
        ({"path": "shortest"}, "path is 'shortest'"),
        ({"strength": "damage"}, "damage is None"),
        ({"damage": LOST}, "damage is given"),
        ({"strength": "damage", "damage": ((-1.0,),)}, "damage is"),
        ({"strength": "damage", "damage": LOST[:1]}, "of 1 layers: expected 2"),
        ({"strength": "damage", "damage": ((1.0,), (1.0,))}, "of 1 heads: expected 4"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message, token_model, token_inputs):
    with pytest.raises(InfoFlowError, match=message):
        run_probes(token_model, token_inputs, [GradedSetsProbe(**settings)], progress=False)


def test_edited_attention_has_no_norms(token_model, token_inputs):
    """Parts that do not add up to what the model adds are refused."""
    edit = ("blocks.1.hook_attn_out", lambda activation, hook: activation * 2)
    with (
        pytest.raises(InfoFlowError, match="layer 1 what the heads bring does not add up"),
        attach(token_model, GradedSetsProbe("norm")),
        torch.no_grad(),
    ):
        token_model.run_with_hooks(token_inputs, fwd_hooks=[edit])


# Edges, by the paths that use them


def random_edges(n_pos, seed):
    generator = torch.Generator().manual_seed(seed)
    edges = torch.rand(3, 2, n_pos, n_pos, generator=generator)
    return edges * (torch.rand(edges.shape, generator=generator) < 0.7)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("n_sources", [4, 3])
def test_an_edge_has_the_best_path_from_any_token_that_uses_it(path, layer, n_sources):
    edges, place = random_edges(4, seed=3), torch.tensor([[3, 1], [2, -1]])
    join = torch.mul if path == "product" else torch.minimum
    kept, held = add_own(edges), torch.zeros(2, 4, 1)
    onwards = propagate_back(kept, BEST[path], queries=place, layer=layer)[..., None]
    held[:, :n_sources] = 1  # by any token; a position beyond (CLS) holds nothing of its own
    behind = propagate_edges(kept[:-1], BEST[path])[..., :n_sources].amax(dim=-1)
    so_far = torch.stack([held[..., 0], *behind])[:, :, None, None]
    found = join(join(onwards, edges[:, :, None]), so_far)
    assert found.shape == (3, 2, 2, 4, 4)
    top = range(3)[layer]
    assert not found[top + 1 :].any()
    assert not found[:, 1, 1].any()  # a state that the sequence does not have
    for sequence, asked in ((0, 0), (0, 1), (1, 0)):
        layers = [[edges[i, sequence].tolist()] for i in range(top + 1)]
        state = int(place[sequence, asked])
        for i, query, key in itertools.product(range(top + 1), range(4), range(4)):
            through = (i, 0, query, key)
            expected = max(
                routes.best_path(layers, state, source, path, through)
                for source in range(n_sources)
            )
            assert abs(float(found[i, sequence, asked, query, key]) - expected) < 1e-6


@pytest.mark.parametrize("path", PATHS)
def test_the_parts_of_a_path_meet_in_the_middle(path):
    """The best path to a state goes through the best of the positions of any layer."""
    edges = random_edges(5, seed=8)
    place = torch.arange(5).expand(2, -1)
    onwards = propagate_back(add_own(edges), BEST[path], queries=place)
    graded = propagate(strength=list(edges), path=path).strengths
    for layer in range(2):
        upper, lower = onwards[layer, ..., None], graded[layer][:, None]
        joined = upper * lower if path == "product" else torch.minimum(upper, lower)
        torch.testing.assert_close(joined.amax(dim=2), graded[-1])

"""Contribution routes against parts added one by one, and models whose values are known."""

from itertools import product

import numpy as np
import pytest
import torch

from infoflow_lens import InfoFlowError, attach, build_model, load_any, open_model, run_probes
from infoflow_lens.hooks import ContributionRoutes
from infoflow_lens.models.architecture import Architecture
from tests.conftest import make_token_model, some_of
from tests.reference import routes, zoo


def edges_by_hand(model, x, sequence, heads_apart=True):
    _, cache = model.run_with_cache(x)
    found = []
    for layer, block in enumerate(model.blocks):
        attention = block.attn
        output = attention.W_O.detach().double().numpy()
        values = cache["v", layer][sequence].double().numpy()
        values = values.repeat(len(output) // values.shape[1], axis=1)
        bias = getattr(attention, "b_O", None)
        found.append(
            routes.importances(
                cache["resid_pre", layer][sequence].double().numpy(),
                cache["pattern", layer][sequence].double().numpy(),
                values,
                output,
                0.0 if bias is None else bias.detach().double().numpy(),
                heads_apart,
            )
        )
    return found


def hosted():
    model = build_model(
        Architecture(n_heads=(2, 3), d_model=12, d_token=3, n_tokens=5, d_mlp=4), seed=3
    )
    return model, torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


def token_ids(**changes):
    model = make_token_model(**changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # biases count with the values, and in the whole
        for name, parameter in model.named_parameters():
            if "b_V" in name or "b_O" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.randint(17, (2, 5), generator=generator)


MODELS = {
    "vector tokens": hosted,
    "token ids": token_ids,
    "three layers": lambda: token_ids(n_layers=3),
    "grouped values": lambda: token_ids(n_key_value_heads=2),
}

EDGES = list(product(MODELS, [True, False], ["widest", "rollout"]))


@pytest.mark.parametrize(
    ("name", "heads_apart", "combine"),
    some_of(EDGES, *[case for i, case in enumerate(EDGES) if i % 8 in (0, 3, 5, 6)]),
)
def test_edges_are_importances_and_scores_follow_all_paths(name, combine, heads_apart):
    model, x = MODELS[name]()
    probe = ContributionRoutes(combine, heads_apart=heads_apart)
    (found,) = run_probes(model, x, [probe], progress=False)
    follow = {"widest": routes.widest, "rollout": routes.rollout}[combine]
    for sequence in range(2):
        edges = edges_by_hand(model, x, sequence, heads_apart)
        for layer in range(len(edges)):
            expected = follow(edges[: layer + 1])[:, : found.scores.shape[3]]
            np.testing.assert_allclose(found.scores[layer, sequence], expected, atol=2e-5)


@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3])
def test_scores_above_a_threshold_are_the_papers_routes(threshold):
    """A search from a state through edges above the threshold reaches these sources."""
    model, x = token_ids(n_layers=3)
    (found,) = run_probes(model, x, [ContributionRoutes()], progress=False)
    edges = edges_by_hand(model, x, 0)
    sizes = set()
    for state in range(5):
        expected = routes.reached_above(edges, state, threshold)
        assert set((found.scores[2, 0, state] > threshold).nonzero().flatten().tolist()) == expected
        sizes.add(len(expected))
    assert len(sizes) > 1


def test_a_head_that_brings_nothing_is_no_edge():
    """Attention is wide, but the values are 0: every state keeps to itself."""
    model, x = token_ids()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "W_V" in name or "b_V" in name or "b_O" in name or ".v." in name:
                parameter.zero_()
    _, cache = model.run_with_cache(x)
    assert cache["v", 0].abs().max() == 0
    for combine in ("widest", "rollout"):
        (found,) = run_probes(model, x, [ContributionRoutes(combine)], progress=False)
        assert found.scores.equal(torch.eye(5).expand_as(found.scores))


@pytest.fixture(scope="module")
def zoo_model(tmp_path_factory):
    def load(name, **settings):
        return load_any(zoo.save(name, tmp_path_factory.mktemp(name)), **settings).model

    return load


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "granite", "gemma2"])
def test_models_of_many_kinds_are_decomposed(zoo_model, name):
    """Grouped queries, attention beside the MLP, a factor and a norm on what is added."""
    model, x = zoo_model(name), zoo.tokens(2, 6)
    (found,) = run_probes(model, x, [ContributionRoutes("rollout")], progress=False)
    sums = found.scores.sum(dim=-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    if name not in ("granite", "gemma2"):
        for sequence in range(2):
            expected = routes.rollout(edges_by_hand(model, x, sequence))
            np.testing.assert_allclose(found.scores[1, sequence], expected, atol=2e-5)


def test_in_half_precision_it_is_nearly_the_same(zoo_model):
    x = zoo.tokens(4, 6)
    whole, half = (
        run_probes(zoo_model("llama", dtype=dtype), x, [ContributionRoutes()], progress=False)[0]
        for dtype in ("float32", "bfloat16")
    )
    assert half.scores.dtype == torch.float32
    assert (whole.scores - half.scores).abs().mean() < 0.01


def test_what_is_bent_before_it_is_added_is_refused_before_any_pass():
    model, probe = open_model(zoo.bend(zoo.build("llama"))), ContributionRoutes()
    with pytest.raises(InfoFlowError, match=r"cannot be decomposed: in layer 0 .* something else"):
        run_probes(model, zoo.tokens(2, 6), [probe], progress=False)
    assert probe.n_sequences == 0


def test_edited_heads_are_refused(token_model, token_inputs):
    """The values that are seen are then not those that the state is made of."""
    name = "blocks.1.attn.hook_z"
    with (
        attach(token_model, ContributionRoutes()),
        pytest.raises(InfoFlowError, match=r"in layer 1 .* a hook of yours changes it"),
    ):
        token_model.run_with_hooks(token_inputs, fwd_hooks=[(name, lambda z, hook: z * 2)])

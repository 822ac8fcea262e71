"""Constructions over vector tokens: within their bounds, and exact with a hard maximum."""

import math

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.studies.bounds import depth_separation_error, softmin_gap
from infoflow_lens.studies.constructions import build_construction
from infoflow_lens.studies.constructions.depth_separation import ffn_error
from infoflow_lens.studies.constructions.products import product_units

from ...reference import transformer as reference

CASES = [
    ("depth_separation", {"ffn": "exact", "beta": 100.0}),
    ("depth_separation", {"eps": 0.5, "n_tokens": 9}),
    ("d_retrieval", {"n_components": 3}),
    ("d_retrieval", {"n_components": 3, "extremum": ("max", "min", "max")}),
    (
        "d_retrieval",
        {
            "n_components": 3,
            "outer": "identity",
            "extremum": ("min", "min", "max"),
            "subsets": ((5, 1), (0,), (3, 2)),
        },
    ),
    ("d_retrieval", {"n_components": 2, "outer": "square_sum"}),
    ("intrinsic_dimension", {"n_components": 3}),
    ("best_tree", {"n_tokens": 8}),
    ("best_tree", {"n_tokens": 6, "edges": ((0, 1), (0, 2), (3, 0)), "matrix_kind": "gaussian"}),
    ("position_sum", {"positions": (1, 6, 3)}),
    ("global_mean", {}),
    ("kth_largest", {"n_tokens": 7, "k": 3, "attention": "softmax", "beta": 50.0}),
]
HARD = [
    ("depth_separation", {"ffn": "exact"}),
    *[case for case in CASES if case[0] in ("d_retrieval", "intrinsic_dimension", "best_tree")],
    *[("kth_largest", {"n_tokens": 9, "k": k}) for k in range(1, 10)],
]


def sampled(name, n=200, **parameters):
    """Model, task, and inputs with targets, in float64."""
    model, task = build_construction(name, **parameters)
    model.to(torch.float64, print_details=False)
    model.requires_grad_(False)
    x = task.sample(n, seed=0)[0].double()
    if name == "depth_separation":
        x = x / x.norm(dim=-1, keepdim=True)  # float32 is not on the sphere to 1e-16
    return model, task, x, task.target(x)


@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_the_hosted_model_is_eqs_1_and_2(name, parameters):
    model, _, x, _ = sampled(name, n=20, **parameters)
    expected = reference.forward(model.architecture, model.state_dict(), x)["output"]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("name", "parameters"), HARD)
def test_hard_attention_is_exact(name, parameters):
    model, _, x, y = sampled(name, **(parameters | {"attention": "hardmax"}))
    # the weights 1/3 of depth separation are rounded to float32
    atol = 1e-6 if name == "depth_separation" else 1e-12
    torch.testing.assert_close(model(x), y, rtol=0, atol=atol)


@pytest.mark.parametrize("n_tokens", [8, 32, 128])
def test_depth_separation_stays_below_its_bound_and_falls_like_one_over_beta(n_tokens):
    errors = []
    for beta in (1e2, 1e3, 1e4, 1e5):
        model, _, x, y = sampled(
            "depth_separation", n=60, n_tokens=n_tokens, ffn="exact", beta=beta
        )
        error = float((model(x) - y).abs().max())
        assert error <= depth_separation_error(n_tokens, beta)
        errors.append(math.log10(error))
    slope = (errors[-1] - errors[0]) / 3
    assert -1.5 < slope < -0.9


def largest_sum(matrices, edges, x):
    """The best tuple of a tree by tables [T, T], a place at a time from the leaves."""
    left = dict(enumerate(edges))
    tables = {k: x @ a @ x.mT for k, a in enumerate(matrices.double())}
    worth = {place: torch.zeros(x.shape[:2]).double() for edge in edges for place in edge}
    while left:
        places = [place for edge in left.values() for place in edge]
        number, leaf = next((k, p) for k, e in left.items() for p in e if places.count(p) == 1)
        i, j = left.pop(number)
        table = tables[number] if leaf == j else tables[number].mT  # [other, leaf]
        other = i if leaf == j else j
        worth[other] = worth[other] + (table + worth.pop(leaf)[:, None]).amax(dim=2)
    return next(iter(worth.values())).amax(dim=1)


TREES = {
    "chain": (((0, 1), (1, 2)), (2, 1)),
    "star": (((0, 1), (0, 2), (0, 3)), (3, 1)),
    "chain of five": (((0, 1), (1, 2), (2, 3), (3, 4)), (2, 2, 1)),
    "tree of six": (((0, 1), (1, 2), (2, 3), (1, 4), (2, 5)), (4, 1, 1)),
}


@pytest.mark.parametrize(("n_tokens", "n"), [(24, 40), (64, 10), (256, 2)])
@pytest.mark.parametrize("name", TREES)
def test_a_tree_needs_as_many_layers_as_it_is_high_at_every_length(name, n_tokens, n):
    """Hard heads are exact; softmax loses at most a W0((T-1)/e) / beta, and never gains."""
    edges, heads = TREES[name]
    hard, task, x, y = sampled(
        "best_tree", n, edges=edges, n_tokens=n_tokens, attention="hardmax", beta=1.0
    )
    assert hard.architecture.n_heads == heads
    expected = largest_sum(task.matrices, edges, x)
    torch.testing.assert_close(y[:, 0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(hard(x)[:, 0], expected, rtol=0, atol=1e-12)
    for beta in (10.0, 1e3, 1e5):
        model, *_ = sampled("best_tree", 1, edges=edges, n_tokens=n_tokens, beta=beta)
        lost = expected - model(x)[:, 0]
        assert float(lost.min()) > -1e-12
        assert float(lost.max()) <= task.arity * softmin_gap(n_tokens, beta)


def test_depth_separation_keeps_eps_with_a_width_of_order_one_over_eps():
    widths = []
    for eps in (0.5, 0.1, 0.02):
        model, task, x, y = sampled("depth_separation", eps=eps)
        bound = depth_separation_error(16, model.architecture.attn_scale, ffn_error(task, eps=eps))
        assert float((model(x) - y).abs().max()) <= bound <= eps
        widths.append(model.cfg.d_mlp * eps)
        inner = [model.blocks[0].mlp.W_in, model.blocks[0].mlp.W_out, model.blocks[1].attn.W_Q]
        assert all(weight.abs().max() <= 1 for weight in inner)  # the lower bound's constraint
    assert max(widths) / min(widths) <= 2


@pytest.mark.parametrize("eps", [0.1, 0.01, 0.005])
def test_depth_separation_keeps_eps_in_float32_too(eps):
    model, task = build_construction("depth_separation", eps=eps)
    x, y = task.sample(500, seed=3)
    assert float((model(x) - y).detach().abs().max()) <= eps


def test_an_adversary_does_not_get_past_the_bound():
    """Gradient ascent on the error, on the sphere."""
    model, task, x, _ = sampled("depth_separation", n=30, n_tokens=8, ffn="exact", beta=1e3)
    x.requires_grad_(True)
    for _ in range(60):
        error = (model(x) - task.target(x)).abs()
        (gradient,) = torch.autograd.grad(error.sum(), x)
        with torch.no_grad():
            x += 0.02 * gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            x /= x.norm(dim=-1, keepdim=True)
    assert float(error.detach().max()) <= depth_separation_error(8, 1e3)


@pytest.mark.parametrize(
    ("name", "parameters", "averages"),
    [("d_retrieval", {"n_components": 3}, 3), ("intrinsic_dimension", {"n_components": 2}, 4)],
)
def test_soft_retrieval_errs_by_a_softmin_for_each_head(name, parameters, averages):
    model, _, x, y = sampled(name, **parameters, beta=50.0)
    assert 0 < float((model(x) - y).abs().max()) <= averages * softmin_gap(16, 50.0)


@pytest.mark.parametrize("n", [2, 8, 100])
def test_the_softmin_gap_is_tight_where_all_other_gaps_are_equal(n):
    gaps = torch.linspace(0, 20, 20001, dtype=torch.float64)
    averages = gaps * (n - 1) * (-gaps).exp() / (1 + (n - 1) * (-gaps).exp())
    assert float(averages.max()) == pytest.approx(softmin_gap(n, 1.0), rel=1e-6)


@pytest.mark.parametrize("eps", [1e-2, 1e-3, 1e-4])
def test_tanh_units_multiply_within_eps_with_weights_of_at_most_one(eps):
    places = torch.eye(6)
    units = product_units(places[:, :3], places[:, 3:], "tanh", eps, radius=1 / 3)
    ball = torch.randn(4000, 2, 3, generator=torch.Generator().manual_seed(0))
    ball = ball / ball.norm(dim=-1, keepdim=True) / 3
    ball[:2000, 1] = ball[:2000, 0]  # where the fourth powers are largest
    state = ball.flatten(1).double()
    product = torch.tanh(state @ units.w_in.double() + units.b_in) @ units.w_out.double()
    error = float((product - (ball[:, 0] * ball[:, 1]).sum(-1)).abs().max())
    assert error <= units.error <= eps
    assert error > 0.2 * units.error  # a bound of the right size
    assert max(float(w.abs().max()) for w in (units.w_in, units.b_in, units.w_out)) <= 1


@pytest.mark.parametrize("k", [2, 4, 8])
def test_a_single_layer_reaches_no_rank_but_the_first_and_the_last(k):
    model, _, x, y = sampled("kth_largest", n_tokens=9, k=k, n_layers=1)
    extreme = x[..., 0].amax(1, True) if k <= 5 else x[..., 0].amin(1, True)
    assert model(x).equal(extreme)
    assert float((model(x) - y).abs().mean()) > 0.05


def test_fewer_layers_give_the_number_of_that_rank():
    for n_layers in (1, 2, 3):
        model, _, x, _ = sampled("kth_largest", n_tokens=9, k=4, n_layers=n_layers)
        assert model(x).equal(x[..., 0].sort(dim=1, descending=True).values[:, n_layers - 1, None])


def test_specific_positions_have_equal_weights_whatever_the_tokens_are():
    model, task = build_construction("position_sum")
    _, cache = model.run_with_cache(task.sample(20, seed=0)[0])
    weights = cache["pattern", 0][:, 0, -1]
    torch.testing.assert_close(weights[:, :3], torch.full((20, 3), 1 / 3))
    assert weights[:, 3:].max() < 1e-15


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("depth_separation", {"tokens": "normal"}, "tokens is 'normal'"),
        ("depth_separation", {"ffn": "relu"}, "ffn is 'relu'"),
        ("depth_separation", {"eps": 1e-3}, "expected a larger eps, or ffn='exact'"),
        ("depth_separation", {"attention": "relu"}, "attention is 'relu'"),
        ("kth_largest", {"tokens": "normal"}, "tokens is 'normal'"),
        ("d_retrieval", {"outer": "product"}, "outer is 'product'"),
        ("kth_largest", {"n_layer": 1}, "did you mean 'n_layers'"),
        ("kth_largest", {"n_layers": 10**3}, "n_layers is 1000: expected 1 to"),
    ],
)
def test_bad_parameters_are_named(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        build_construction(name, **parameters)

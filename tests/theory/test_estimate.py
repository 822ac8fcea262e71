"""The two-step estimate: worked examples, thresholds in T, flags, and known results."""

import json

import numpy as np
import pytest
import torch

import infoflow_lens
from infoflow_lens import Architecture, InfoFlowError, load_task
from infoflow_lens.models.architecture import TokenArchitecture
from infoflow_lens.tasks import Target, TriangleCenter
from infoflow_lens.theory.comparison import (
    Component,
    d_retrieval_profile,
    intrinsic_dimension_profile,
    triangle_center_profile,
)
from infoflow_lens.theory.estimate import (
    estimate,
    max_position_capacity,
    min_heads,
    min_heads_at,
    phase_diagram,
)
from infoflow_lens.theory.jobs import Max
from infoflow_lens.theory.schedule import LayerSchedule, Samples, Schedule, rank_of, run_schedule
from infoflow_lens.theory.shapes import ModelShape
from tests.conftest import some_of


def architecture(heads, n_tokens=64, d_model=16, d_token=4, positions="none"):
    return Architecture(
        n_heads=heads,
        d_head=tuple(4 for _ in heads),
        d_model=d_model,
        d_token=d_token,
        n_tokens=n_tokens,
        positional_embedding=positions,
    )


def estimated(name, heads, n_tokens=64, positions="none", task=None, verify=20, **settings):
    """The estimate; few inputs are run, as what they say is the same for more."""
    loaded = load_task(name, n_tokens=n_tokens, d_token=4, **(task or {}))
    of_heads = architecture(heads, n_tokens, positions=positions)
    return estimate(of_heads, loaded, verify=verify, **settings)


class Inconsistent(TriangleCenter):
    """A target of the user's whose counts are not those of its components."""

    @property
    def comparison(self):
        return d_retrieval_profile(1)


def first_excluded(profile, heads, count, trees):
    """The smallest T from which counting excludes max-position retrieval, up to 400."""
    excluded = [
        t
        for t in range(max(4, profile.dimension), 400)
        if max_position_capacity(profile, heads, t, trees) < profile.number(t, count)
    ]
    assert excluded == list(range(excluded[0], 400))  # once excluded, always excluded
    return excluded[0]


@pytest.mark.parametrize(
    ("profile", "heads", "count", "trees", "first"),
    [
        (intrinsic_dimension_profile(4), (3, 5), "paper", 1, 39),
        (intrinsic_dimension_profile(4), (3, 5), "paper", 4, 95),
        (intrinsic_dimension_profile(4), (3, 20), "paper", 1, 105),
        (intrinsic_dimension_profile(4), (3, 20), "paper", 4, 216),
        (d_retrieval_profile(4), (3,), "paper", 1, 20),
        (d_retrieval_profile(4), (3,), "paper", 4, 29),
        (triangle_center_profile(), (4, 4), "proved", 1, 62),
    ],
)
def test_thresholds_in_t(profile, heads, count, trees, first):
    assert first_excluded(profile, heads, count, trees) == first


def test_the_count_decides_what_is_excluded():
    """Only the ordered count excludes (2,4) and (3,5); the unordered one excludes none."""
    profile = intrinsic_dimension_profile(4)
    for heads in ((2, 4), (3, 5), (4, 4)):
        for count in ("unordered", "proved"):
            assert max_position_capacity(profile, heads, 64) >= profile.number(64, count)


@pytest.mark.parametrize("d", [2, 3, 4, 6])
def test_heads_that_counting_asks_for(d):
    one = d_retrieval_profile(d)
    assert min_heads(one, (1,), "paper") == min_heads(one, (1,), "proved") == d
    pairs = intrinsic_dimension_profile(d)
    assert min_heads(pairs, (1, 5), "paper") == d
    assert min_heads(pairs, (1, 5), "unordered") == -(-d // 2)
    assert min_heads(pairs, (1, 5), "proved") == 1
    assert min_heads(pairs, (1, 1, 5), "paper") == max(1, d - 1)  # hidden layers share the work
    assert min_heads(triangle_center_profile(), (1, 5), "proved") is None
    assert min_heads(one, (1, 1), "paper") == 1


@pytest.mark.parametrize("trees", [1, 4])
@pytest.mark.parametrize("n_tokens", [10, 33, 64, 200])
def test_heads_at_this_t_are_the_least_that_meet_the_count(trees, n_tokens):
    profile = intrinsic_dimension_profile(4)
    found = min_heads_at(profile, (1, 5), n_tokens, "paper", trees)
    needed = profile.number(n_tokens, "paper")
    assert max_position_capacity(profile, (found, 5), n_tokens, trees) >= needed
    if found > 1:
        assert max_position_capacity(profile, (found - 1, 5), n_tokens, trees) < needed


@pytest.mark.parametrize(
    ("heads", "verdict", "m", "saturated", "lower", "upper"),
    [
        (1, "excluded, proved", 64, True, 15.0, 16.0),
        (2, "excluded, proved", 64, True, 15.0, 16.0),
        (3, "excluded, proved", 48, False, 11.0, 16.0),
        (4, "allowed by construction", 0, False, 0.0, 1.0),
    ],
)
def test_example_1_needs_as_many_heads_as_components(heads, verdict, m, saturated, lower, upper):
    """D-retrieval, one layer, D = 4, T = 64, d/E = 1/4."""
    found = estimated("d_retrieval", (heads,))
    assert (found.verdict, found.min_information, found.saturated) == (verdict, m, saturated)
    assert found.lower["counted"] == lower
    assert found.upper["law"] == upper
    assert found.min_heads == found.min_heads_here == 4
    assert found.verified == 1.0
    assert found.upper["total"] == (0.0 if heads == 4 else 15.0)


def test_yu_et_al_2_3_one_head_of_dimension_t_d_is_enough():
    task = load_task("d_retrieval", n_tokens=8, d_token=4)
    wide = estimate(architecture((1,), n_tokens=8, d_model=32), task, trees=4)
    assert wide.upper_information == 8
    assert wide.upper["total"] == 0
    narrow = estimate(architecture((1,), n_tokens=8, d_model=16), task, trees=4)
    assert narrow.upper["total"] == 1


def test_theorem_1_two_layers_of_one_head_against_one_layer():
    two = estimated("depth_separation", (1, 1))
    assert two.verdict == "allowed by construction"
    assert two.upper_information == 2
    one = estimated("depth_separation", (1,), count="proved")
    assert one.verdict == "excluded, proved"
    # one layer: |I|^2 >= C(T,2) - 2 - h T = 1950
    assert one.min_information == 45


@pytest.mark.parametrize(
    ("heads", "m", "upper"),
    [((2, 4), 11, 48), pytest.param((3, 5), 8, 48, marks=pytest.mark.slow)],
)
def test_example_2_with_positions(heads, m, upper):
    sizes = {"task": {"n_components": 4}, "verify": 1}
    found = estimated("intrinsic_dimension", heads, positions="learned", **sizes)
    assert found.verdict == "excluded by the paper's count"
    assert found.min_information == m
    assert found.upper_information == upper
    without = estimated("intrinsic_dimension", heads, **sizes)
    assert without.upper_information == 64


def test_proposition_2_exponents_grow_with_length():
    """Triangle centre: no number of heads is enough, and the least |I| grows like T^(2/3)."""
    sizes = []
    for n_tokens in (64, 512, 4096):
        found = estimated("triangle_center", (4, 4), n_tokens=n_tokens, count="proved")
        assert found.min_heads is None
        assert (found.verified, found.verified_at) == (1.0, 64)  # longer ones are run at 64
        sizes.append(found.min_information)
    assert sizes[0] == 8
    assert sizes[2] / sizes[1] == pytest.approx(4, rel=0.15)  # 8^(2/3)


def test_small_t_is_no_obstruction():
    found = estimated("triangle_center", (4, 4), n_tokens=16, count="proved")
    assert found.min_information == 0
    assert found.verdict == "open"
    assert any("no obstruction" in reason for reason in found.reasons)


def test_allowed_rests_on_the_schedule_that_was_run():
    """At small T global aggregation is cheaper than eight heads; the verdict is about the heads."""
    found = estimated(
        "intrinsic_dimension", (8, 8), n_tokens=16, task={"n_components": 8}, verify=9
    )
    assert found.verdict == "allowed by construction"
    assert found.upper_information == 16
    assert found.verified == 1.0
    assert any("retrieve by score 1, 2, 3, 4, 5, 6, 7, 8" in reason for reason in found.reasons)


def test_an_estimate_is_json():
    values = json.loads(json.dumps(estimated("d_retrieval", (4,), verify=0).to_dict()))
    assert values["verdict"] == "allowed by construction"
    assert "retrieve by score 1, 2, 3, 4" in values["schedule"]


@pytest.mark.parametrize(
    ("name", "parameters", "heads"),
    [
        ("kth_largest", {"k": 5}, (1, 1)),
        ("kth_largest", {"k": 2}, (1,)),
        ("kth_largest", {"k": 900}, (1,)),
    ],
)
def test_what_is_proved_may_grow_more_slowly_than_the_trees(name, parameters, heads):
    """No number of heads was said to be enough, though the proved count is below T."""
    profile = load_task(name, n_tokens=2000, **parameters).comparison
    for n_tokens in (10**4, 10**6):
        assert profile.proved(n_tokens) <= max_position_capacity(profile, heads, n_tokens)
    assert min_heads(profile, heads, "proved") == 1
    assert min_heads(profile, heads, "paper") is None


def test_a_bound_by_samples_says_of_how_many_tokens_they_are():
    found = [estimated("d_retrieval", (4,), n_tokens=n).why for n in (16, 4096)]
    assert "run on 20 inputs, it fails" in found[0]
    assert "run on 20 inputs of 64 tokens, it fails" in found[1]


def test_what_compares_is_not_said_to_compare_nothing():
    """Nested questions look up fact by fact, of which no count is known."""
    found = estimate(ModelShape((1,), (32,), 20, True), load_task("nested_qa"), verify=0)
    assert "no comparisons of the target are counted" in found.reasons[0]


def test_ranks_have_no_places():
    task = load_task("kth_largest", n_tokens=32, k=5)
    found = estimate(architecture((1, 1), 32, d_token=1), task, verify=20)
    assert found.min_heads is None
    assert "retrieve ranks one by one" in " ".join(found.reasons)


def test_the_phase_diagram_turns_at_d():
    task = load_task("intrinsic_dimension", n_components=3)
    rows = phase_diagram(task, [(h, 3) for h in range(1, 5)], [16, 256])
    verdicts = {(row["heads"][0], row["n_tokens"]): row["verdict"] for row in rows}
    assert all(verdicts[h, t] == "allowed by construction" for h in (3, 4) for t in (16, 256))
    assert all(verdicts[h, 256] == "excluded by the paper's count" for h in (1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimated("d_retrieval", (4,), count="exact"), "count is 'exact'"),
        (lambda: estimated("d_retrieval", (4,), trees=0), "trees is 0"),
        (lambda: estimated("d_retrieval", (4,), verify=2.5), "verify is 2.5"),
        (
            lambda: estimate(architecture((4,), 32), load_task("d_retrieval", n_tokens=16)),
            "the task has n_tokens 16, the architecture 32",
        ),
        (
            lambda: estimate(architecture((4,), 16, d_token=3), load_task("d_retrieval")),
            "the task has d_token 4, the architecture 3",
        ),
        (
            lambda: estimate(
                Architecture((1,), 16, 4, 16, attention="relu"), load_task("d_retrieval")
            ),
            "attention is 'relu'",
        ),
        (
            lambda: estimate(
                Architecture((1,), 16, 4, 16, cls_is_key=True), load_task("d_retrieval")
            ),
            "cls_is_key is True",
        ),
        (
            lambda: estimate(architecture((4,), 16), Inconsistent(n_tokens=16)),
            "arity 3, but its profile says dimension 1",
        ),
        (lambda: phase_diagram(load_task("d_retrieval"), [(0,)], [8]), r"heads are \[\(0,\)\]"),
        (lambda: phase_diagram(load_task("d_retrieval"), [(1,)], [8], trees=0), "trees is 0"),
        # all of these were "allowed by construction" at lengths that they cannot have
        (lambda: phase_diagram(load_task("position_sum"), [(1,)], [2]), "from 0 to 1"),
        (lambda: phase_diagram(load_task("in_context_qa"), [(1,)], [9]), "has 14 tokens"),
        (lambda: estimated("triangle_center", (4, 4), n_tokens=2), "T is 2: expected at least 3"),
        (lambda: infoflow_lens.estimate((2,), None), "task is None: expected a task, or the name"),
        (lambda: infoflow_lens.design(5, 8), "task is 5: expected a task, or the name"),
        (
            lambda: infoflow_lens.estimate((3.0,), "d_retrieval"),
            r"heads are \(3.0,\): expected one or more integers of at least 1",
        ),
        (lambda: infoflow_lens.estimate(2.5, "d_retrieval"), r"heads are \(2.5,\)"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(InfoFlowError, match=message):
        call()


@pytest.mark.parametrize(
    "heads", [2, np.int64(2), np.array([2]), torch.tensor([2]), [2], range(2, 3)]
)
def test_heads_are_given_as_any_integers(heads):
    found = infoflow_lens.estimate(heads, load_task("d_retrieval", n_components=2, n_tokens=4))
    assert (found.n_heads, found.verdict) == ((2,), "allowed by construction")


def test_one_token_and_one_tree_are_not_several():
    one = infoflow_lens.estimate((1,), load_task("depth_separation", n_tokens=2), verify=5)
    assert one.why.startswith("CLS can hold 1 token by max-position retrieval")
    tree = infoflow_lens.estimate((3, 3), load_task("kth_largest", n_tokens=10**6, k=9), verify=0)
    assert "(count='paper', 1 tree by the observed |I_F|)" in tree.why


@pytest.mark.parametrize(("d", "heads"), [(3, (1, 1)), (7, (1, 1, 1, 1))])
def test_token_heads_over_single_tokens_are_jobs(d, heads):
    """Tokens hold what CLS has no head for, and hand it on (findings T3)."""
    found = estimated("d_retrieval", heads, task={"n_components": d})
    assert (found.verdict, found.verified) == ("allowed by construction", 1.0)
    assert found.upper_information == d
    fewer = estimated("d_retrieval", heads[:-1], task={"n_components": d})
    assert fewer.verdict == ("excluded, proved" if d == 3 else "open")


def test_only_the_proved_count_certifies():
    """The ordered count asks for |I| >= 11, but it is an upper bound on the need (T4)."""
    found = estimated("intrinsic_dimension", (2, 4), task={"n_components": 4}, verify=0)
    assert found.lower["counted"] == 11 * 4 / 16 - 1
    assert found.lower["certified"] == 0
    proved = estimated("triangle_center", (4, 4), n_tokens=512, count="proved", verify=0)
    assert proved.lower["certified"] == pytest.approx(proved.min_information * 4 / 16 - 1)
    # even where the count is the stated lower bound, K = 1 is no proof
    d_retrieval = estimated("d_retrieval", (3,), verify=0)
    assert d_retrieval.lower["certified"] < d_retrieval.lower["counted"]


def test_what_is_excluded_for_one_role_is_allowed_to_a_head_with_several():
    """D = 2 with a single first-layer head, T = 64, on the sphere (T5)."""
    task = load_task("intrinsic_dimension", n_tokens=64, d_token=3, tokens="sphere")
    sizes = {"n_heads": (1, 3), "d_model": 24, "d_head": (4, 4), "d_token": 3, "n_tokens": 64}
    linear = estimate(Architecture(**sizes), task, verify=20)
    assert linear.verdict == "excluded by the paper's count"
    assert "it would take an encoder network" in " ".join(linear.reasons)
    encoded = estimate(Architecture(**sizes, d_encoder=64), task, verify=20)
    assert encoded.verdict == "allowed by construction"
    assert "routed heads" in encoded.why
    assert encoded.routed.held == 1
    assert encoded.routed.nmse < 1e-9


@pytest.mark.parametrize(
    ("heads", "verdict"), [((1,), "excl"), ((1, 1), "allowed by construction")]
)
def test_the_kth_largest_is_found_by_adaptive_heads(heads, verdict):
    """k = 3 in two layers of one head with |I| = 3; the counts of fixed trees asked for 7 (T6)."""
    task = load_task("kth_largest", n_tokens=32, k=3)
    found = estimate(architecture(heads, 32, d_token=1), task)
    assert found.verdict.startswith(verdict)
    if verdict == "allowed by construction":
        assert found.upper_information == 3
        assert found.schedule.adaptive
        assert found.verified == 1.0


@pytest.mark.parametrize("count", some_of(["paper", "proved"], "proved"))
def test_no_count_of_fixed_trees_proves_anything_of_two_layers(count):
    """Heads that adapt or are routed are no fixed trees, so such a count is of one role."""
    found = estimated("triangle_center", (2, 1), n_tokens=64, count=count)
    assert found.verdict == "excluded by the paper's count"
    assert estimated("triangle_center", (2,), n_tokens=64).verdict == "excluded, proved"


@pytest.mark.slow
def test_large_sizes_answer_and_say_what_was_left_out():
    """T = 10^9 with positions, D = 20, six layers of twelve heads."""
    shape = ModelShape((12,) * 6, (768,) * 6, 10**9, positional=True)
    task = load_task("intrinsic_dimension", n_components=20, n_tokens=10**9)
    found = estimate(shape, task, verify=0)
    assert found.verdict == "allowed by construction"
    assert any("partial schedules beyond" in words for words in found.left_out)
    triple = load_task("triangle_center", n_tokens=10**9)
    assert estimate(shape, triple, verify=0).upper_information == pytest.approx(1.65e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "positions", "size"),
    [
        ("position_sum", "learned", 3),
        ("position_sum", "none", None),
        ("global_mean", "none", 16),
    ],
)
def test_fixed_positions_and_aggregation_have_costs_too(name, positions, size):
    task = load_task(name, n_tokens=16)
    found = estimate(architecture((1,), 16, positions=positions), task)
    assert found.mechanisms == "all mechanisms"
    assert found.upper_information == size
    assert found.verdict == ("excluded, proved" if size is None else "allowed by construction")
    if size is not None:
        assert found.upper["law"] == size * 4 / 16
        assert found.verified == 1.0


@pytest.mark.parametrize(
    ("name", "sizes", "one_layer", "two_layers"),
    [
        ("memorization", {}, 6, 6),
        ("in_context_qa", {}, 14, 4),
        ("template_matching", {}, 3, 3),
        ("in_context_template_matching", {}, 20, 12),
        ("nested_qa", {}, 19, 19),
    ],
)
def test_token_tasks_can_be_asked(name, sizes, one_layer, two_layers):
    task = load_task(name, **sizes)
    for heads, size in (((1,), one_layer), ((1, 1), two_layers)):
        shape = ModelShape(heads, (64,) * len(heads), task.n_tokens, positional=True)
        found = estimate(shape, task)
        assert (found.verdict, found.upper_information) == ("allowed by construction", size)
        assert found.verified == 1.0
    without = estimate(ModelShape((1, 1), (64, 64), task.n_tokens), task)
    # memorized sequences may be told apart by their words alone, in any order
    assert without.verdict == ("open" if name == "memorization" else "excluded, proved")


def test_best_pairs_of_numbers_are_not_said_to_be_excluded():
    """a x y is largest for extreme numbers, which one layer of two heads holds."""
    task = load_task("intrinsic_dimension", n_tokens=32, d_token=1, n_components=1)
    ends = tuple(
        Component(1, lambda x: x[..., 0, 0], symmetric=True, extremum=end) for end in ("max", "min")
    )
    x, _ = task.sample(200, 0)
    layer = LayerSchedule(cls=(Max(0), Max(1)))
    held = run_schedule(Schedule((layer,)), ends, x).members[-1, :, -1]
    assert (task.active_index_set(x) <= held).all()
    for count in ("paper", "proved"):
        found = estimate(architecture((2,), 32, d_token=1), task, count=count)
        assert found.verdict != "excluded, proved"


def distance(p):
    return Component(2, lambda x: -x.diff(dim=-2).abs().pow(p).sum(dim=(-2, -1)), distinct=True)


EUCLIDEAN = Component(2, lambda x: -x.diff(dim=-2).norm(dim=-1).squeeze(-1), distinct=True)


@pytest.mark.parametrize(
    ("task", "needed"),
    [
        (load_task("depth_separation", n_tokens=12), (3, 1)),
        (load_task("best_tree", n_tokens=12), (3, 1)),
        (load_task("d_retrieval", n_components=2, n_tokens=12), (1, 1)),
        (Target(components=(distance(2),), n_tokens=12, d_token=3), (4, 1)),
        (Target(components=(EUCLIDEAN,), n_tokens=12, d_token=3), (4, 1)),
        (Target(components=(distance(1),), n_tokens=12, d_token=3), (20, 1)),
    ],
    ids=["closest pair", "chain", "tokens", "square", "distance", "distance of coordinates"],
)
def test_allowed_means_for_this_d_head(task, needed):
    """Closest pair with d_head = 1 was allowed; u(x) v(y) has two partners a sequence (T4)."""
    heads = (2, 1)
    shape = lambda d_head: ModelShape(heads, (32, 32), 12, d_head=d_head)  # noqa: E731
    found = estimate(shape((63, 8)), task)
    assert found.verdict == "allowed by construction"
    rank, last = found.d_head
    assert last == 1
    assert rank >= 20 if needed[0] == 20 else rank == needed[0]
    if rank > 1:
        fewer = estimate(shape((rank - 1, 8)), task)
        assert fewer.verdict == "open"
        assert f"d_head >= {rank} in layer 1" in fewer.why
    alone = ModelShape(heads, (32, 32), 12, has_mlp=False)
    joins = task.name != "d_retrieval"
    assert (estimate(alone, task).verdict == "open") == joins
    assert (found.products[0] > 0) == joins


@pytest.mark.parametrize(
    ("name", "parameters", "heads", "allowed"),
    [
        ("d_retrieval", {"n_components": 2}, (2,), True),
        ("d_retrieval", {"n_components": 2, "outer": "product"}, (2,), False),
        # one head that reads the two subsets whole compares nothing
        ("d_retrieval", {"n_components": 2, "subsets": ((0, 1), (2, 3))}, (1,), False),
        ("global_mean", {}, (1,), True),
        ("position_sum", {}, (1,), True),
    ],
)
def test_attention_alone_makes_sums_of_what_is_linear(name, parameters, heads, allowed):
    """Products of what CLS holds, and maxima of what it averages, were allowed without networks."""
    task = load_task(name, n_tokens=8, **parameters)
    widths = (32,) * len(heads)
    shape = ModelShape(heads, widths, 8, True, routes=True, has_mlp=False)
    found = estimate(shape, task, verify=20)
    assert (found.verdict == "allowed by construction") == allowed
    assert allowed or "feed-forward networks" in found.why


def test_what_a_certificate_excludes_is_not_allowed():
    """One layer of attention alone does not match templates (Chen & Zou 2024, Theorem 4)."""
    task = load_task("template_matching", n_words=3, length=3)
    assert not infoflow_lens.one_layer_certificate(task.all_sequences()).feasible
    sizes = {"d_model": 32, "n_tokens": 4, "d_vocab": task.d_vocab, "d_output": task.n_labels}
    found = estimate(TokenArchitecture.from_layers(1, 1, d_head=8, **sizes), task)
    assert found.verdict == "open"


def test_a_rank_is_that_of_scores_that_choose():
    """By NumPy: a query's own term changes no choice, a key's does."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
    square = -(x[:, None] - x[None]).square().sum(-1)
    centred = square.numpy() - square.numpy().mean(axis=1, keepdims=True)
    assert rank_of(square) == np.linalg.matrix_rank(centred) == 3 + 1
    assert rank_of(x @ x.T) == 3
    assert rank_of(torch.outer(x[:, 0], x[:, 1])) == 1
    assert rank_of(torch.full((4, 4), -torch.inf)) is None  # no product of queries and keys


def test_what_is_needed_is_counted_of_the_list_that_needs_least():
    """4095 comparisons were needed, 842 made, and yet nothing was excluded."""
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(2, 3, 3, generator=generator)
    form = lambda m, x, y: ((x @ m.to(x)) * y).sum(-1)  # noqa: E731
    two = Component(
        4, lambda z: form(a, z[..., 0, :], z[..., 1, :]) + form(b, z[..., 2, :], z[..., 3, :])
    )
    found = estimate(
        ModelShape((1, 2), (32, 32), 8),
        Target(components=(two,), n_tokens=8, d_token=3),
        verify=20,
    )
    assert (found.verdict, found.needed) == ("open", 2 * (8**2 - 1))
    assert found.needed <= found.capacity
    assert "splits into scores of fewer tokens" in found.reasons[0]


def test_no_sentence_says_what_another_one_has_said():
    """The schedule of the verdict stood in three sentences, and "?" in the place of a rank."""
    second = Component(1, lambda x: x[..., 0, 0], rank=2, extremum="min")
    task = Target(components=(second,), n_tokens=8, d_token=2)
    found = estimate(ModelShape((1, 1), (8, 8), 8), task, verify=5)
    assert sum("retrieve" in reason for reason in found.reasons) == 1
    assert "largest" not in " ".join(found.reasons)  # the smallest but one
    assert "? where no rank is known" in " ".join(found.reasons)


def test_tokens_that_fit_in_no_memory_are_refused(monkeypatch):
    """They ended the process: the system takes memory that is promised and not there."""
    monkeypatch.setattr("infoflow_lens.theory.schedule.free_memory", lambda: 10**9)
    estimate(architecture((2,), 8), load_task("d_retrieval", n_tokens=8), verify=20)
    # of many inputs no more are drawn than are run
    assert Samples.draw(load_task("d_retrieval", n_tokens=64), 10**7, 0) is not None
    large = load_task("d_retrieval", n_tokens=8, d_token=10**6)
    with pytest.raises(InfoFlowError, match=r"d_token is 1000000: .* expected fewer numbers"):
        estimate(architecture((2,), 8, d_token=10**6), large, verify=20)

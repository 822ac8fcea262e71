"""Constructions of Chen & Zou 2024: exact where the docstring says so, failing where it says so."""

import pytest
import torch

from infoflow_lens import InfoFlowError, load_task
from infoflow_lens.studies.constructions import CONSTRUCTIONS, AttentionOnly, build_construction
from infoflow_lens.studies.constructions.nested import doubling_hops
from infoflow_lens.studies.papers.nested_qa import fewest_layers

from ...conftest import some_of
from ...reference import attention_only as reference

QA = {"n_questions": 4, "n_answers": 3, "n_pairs": 2}
TM = {"n_words": 5, "length": 3}
ICTM = {"n_words": 3, "length": 2, "n_answers": 3, "n_pairs": 2}
CHAIN = {"n_entities": 5, "hops": 3, "n_chains": 1}
CHAINS = {"n_entities": 4, "hops": 1, "n_chains": 2}
MEMORY = {"n_words": 4, "length": 3, "n_sequences": 30}

# construction, its parameters, small sizes for all sequences, the paper's or larger ones for
# random sequences, and the margin that the docstring gives
EXACT = [
    ("memorization", {}, MEMORY, {"n_words": 100}, 1.0),
    ("memorization", {"form": "compact"}, MEMORY, {}, 1.0),
    ("in_context_qa", {}, QA, {}, 3.0),
    ("in_context_qa", {}, QA | {"n_questions": 3, "n_pairs": 3}, {"n_pairs": 8}, 3.0),
    ("in_context_qa_softmax", {}, QA, {}, 0.999),
    ("in_context_qa_softmax", {"beta": 0.5}, QA, {}, 0.0),
    ("in_context_qa_softmax", {"form": "scaled"}, QA, {}, 0.166),
    ("in_context_qa_softmax", {"form": "scaled", "beta": 0.5}, QA, {}, 0.0),
    ("in_context_qa_one_layer", {}, QA, {"n_questions": 30}, 0.999),
    ("nested_qa", {}, CHAINS, {"hops": 4}, 1.0),
    ("nested_qa", {}, CHAIN, {"hops": 2, "n_chains": 5}, 1.0),
    ("nested_qa", {"form": "copy_once"}, CHAINS, {"hops": 6}, 1.0),
    ("nested_qa", {"form": "copy_once"}, CHAIN, {}, 1.0),
    ("nested_qa", {"form": "doubling"}, CHAINS, {"hops": 6}, 1.0),
    ("nested_qa", {"form": "doubling"}, CHAIN, {}, 1.0),
    ("template_matching", {}, TM, {}, 2.5),
    ("template_matching", {}, TM | {"length": 4}, {"length": 5}, 2.5),
    ("template_matching", {"form": "ternary"}, TM, {}, 0.0),
    ("template_matching", {"form": "ternary"}, TM | {"length": 4}, {"length": 6}, 0.0),
    ("template_matching_one_layer", {}, TM, {}, 0.499),
    ("template_matching_one_layer", {}, TM | {"length": 4}, {"n_words": 50, "length": 5}, 0.499),
    ("in_context_template_matching", {}, ICTM, {}, 0.199),
    (
        "in_context_template_matching",
        {},
        {"n_words": 3, "length": 3, "n_answers": 2, "n_pairs": 2, "templates": ("aab", "aba")},
        {"n_pairs": 4},
        0.199,
    ),
    ("in_context_template_matching", {"gain": 2.0}, ICTM, {"length": 2}, 0.999),
    ("in_context_template_matching", {"read_all": True}, ICTM, {"n_pairs": 3}, 0.18),
]
NAMES = sorted({case[0] for case in EXACT})
FIRST = [next(case for case in EXACT if case[0] == name) for name in NAMES]


def margins(model, x, y):
    """By how much the right logit leads, for every sequence."""
    with torch.no_grad():
        logits = torch.cat([model(part)[:, -1] for part in x.split(25)]).double()
    right = logits.gather(1, y[:, None])[:, 0]
    return right - logits.scatter(1, y[:, None], -torch.inf).amax(dim=1)


@pytest.mark.parametrize(("name", "own", "small", "large", "margin"), EXACT)
def test_every_sequence_of_a_small_space_is_right(name, own, small, large, margin):
    model, task = build_construction(name, **small, **own)
    least = float(margins(model, *task.all_sequences()).min())
    assert least > 0
    assert least >= margin


@pytest.mark.parametrize(("name", "own", "small", "large", "margin"), some_of(EXACT, *FIRST))
def test_random_sequences_of_the_papers_sizes_are_right(name, own, small, large, margin):
    model, task = build_construction(name, **large, **own)
    least = float(margins(model, *task.sample(40, seed=1)).min())
    assert least > 0
    assert least >= margin


@pytest.mark.parametrize(("name", "own", "small", "large", "margin"), EXACT)
def test_the_hosted_model_is_the_papers_network(name, own, small, large, margin):
    """Logits of the HookedTransformer against eq 2 with dense matrices, in float64."""
    task = load_task(CONSTRUCTIONS[name].task, **small)
    network = CONSTRUCTIONS[name].build(task, **own)
    assert isinstance(network, AttentionOnly)
    dense = [[(head.qk.double(), head.v.double()) for head in layer] for layer in network.layers]
    x, _ = task.sample(20, seed=2)
    expected = torch.stack(
        [
            reference.forward(
                sequence,
                task.d_vocab,
                network.rows.padding,
                dense,
                network.classifier.double(),
                network.attention,
            )
            for sequence in x.tolist()
        ]
    )
    hosted = network.host()(x)[:, -1].double()
    scale = expected.abs().max()
    torch.testing.assert_close(hosted, expected, rtol=1e-5, atol=1e-5 * float(scale))


def test_columns_are_token_position_and_padding():
    task = load_task("in_context_qa", **QA)
    network = CONSTRUCTIONS["in_context_qa_softmax"].build(task)
    x, _ = task.sample(3, seed=0)
    columns = network.columns(x)
    assert columns.shape == (3, network.rows.d_model, 8)
    assert columns.sum(dim=1).eq(2).all()
    model, _ = build_construction("in_context_qa_softmax", **QA)
    _, cache = model.run_with_cache(x)
    assert cache["resid_pre", 0].equal(columns.transpose(1, 2))


SHAPES = [
    ("memorization", {}, MEMORY, (1, 4, max(4 * 5, 5 + 4))),
    ("memorization", {"form": "compact"}, MEMORY, (1, 3, 5 + 4 + 30)),
    ("in_context_qa", {}, QA, (2, 1, 8 + 8)),
    ("in_context_qa_softmax", {}, QA, (2, 1, 8 + 8 + 4)),
    ("in_context_qa_one_layer", {}, QA, (1, 2 * 4, 8 + 8)),
    ("nested_qa", {}, CHAIN, (2 * 3, 1, 6 + 11 + 2 * 5)),
    ("nested_qa", {"form": "copy_once"}, CHAIN, (3 + 1, 1, 6 + 11 + 4 * 5)),
    ("nested_qa", {"form": "doubling"}, CHAIN, (1 + 2, 2, 6 + 11 + 4 * 5)),
    ("template_matching", {}, TM, (2, 1, 6 + 4 + 3)),
    ("template_matching", {"form": "ternary"}, TM, (2, 1, 6 + 4)),
    ("template_matching_one_layer", {}, TM, (1, 5 * 3, 6 + 4 + 3)),
    ("in_context_template_matching", {}, ICTM, (3, 2 * 2, 7 + 11 + 4)),
]


@pytest.mark.parametrize(("name", "own", "sizes", "shape"), SHAPES)
def test_layers_heads_and_width_are_the_theorems(name, own, sizes, shape):
    model, _ = build_construction(name, **sizes, **own)
    assert (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_model) == shape


@pytest.mark.parametrize("hops", some_of(range(1, 11), *range(1, 7)))
def test_doubling_takes_as_few_layers_as_sets_that_double_allow(hops):
    model, task = build_construction(
        "nested_qa", n_entities=2 * hops + 4, hops=hops, form="doubling"
    )
    taken = doubling_hops(hops)
    assert sum(taken) == hops
    assert all(count in [2**j for j in range(step + 1)] for step, count in enumerate(taken))
    assert model.cfg.n_layers == 1 + len(taken) == fewest_layers(hops)
    x, y = task.sample(100, seed=0)
    lead = margins(model, x, y)
    assert lead.eq(1).all()  # integers: exact, for any number of hops


def test_chains_need_the_right_order_of_facts_and_not_their_places():
    """The same facts in another order lead to the same end; another query leads elsewhere."""
    model, task = build_construction("nested_qa", n_entities=8, hops=3, n_chains=2)
    x, y = task.sample(50, seed=1)
    facts = x[:, :-2].view(50, 6, 3)
    turned = torch.cat([facts.flip(1).flatten(1), x[:, -2:]], dim=1)
    assert model(turned)[:, -1].argmax(dim=1).equal(y)
    other = x.clone()
    starts, ends = facts[:, :, 0], facts[:, :, 2]
    first = ~(starts[:, :, None] == ends[:, None, :]).any(dim=2)  # of two facts: chains' starts
    other[:, -2] = torch.where(
        starts[first].view(50, 2)[:, 0] == x[:, -2],
        starts[first].view(50, 2)[:, 1],
        starts[first].view(50, 2)[:, 0],
    )
    answer = model(other)[:, -1].argmax(dim=1)
    assert answer.equal(task.target(other))
    assert not answer.eq(y).any()


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_theorem_5_fails_as_printed(length):
    model, task = build_construction("template_matching", n_words=6, length=length, form="printed")
    assert float((margins(model, *task.sample(400, seed=0)) > 0).float().mean()) < 0.75


@pytest.mark.parametrize("length", [2, 3])
def test_theorem_6_fails_as_printed(length):
    model, task = build_construction(
        "in_context_template_matching", n_words=4, length=length, n_answers=3, form="printed"
    )
    assert float((margins(model, *task.sample(400, seed=0)) > 0).float().mean()) < 0.75


def test_codes_too_large_for_float32_are_hosted_in_float64():
    for length, dtype in ((4, torch.float32), (8, torch.float64)):
        model, task = build_construction(
            "template_matching", n_words=12, length=length, form="ternary"
        )
        assert model.W_E.dtype == dtype
        assert float(margins(model, *task.sample(500, seed=0)).min()) > 1


def test_lemma_1_gives_any_attention_map():
    alpha = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    model, task = build_construction("instructive_attention", **TM, alpha=alpha)
    _, cache = model.run_with_cache(task.sample(7, seed=0)[0])
    # the pattern is query by key, alpha is source by destination
    torch.testing.assert_close(cache["pattern", 0], alpha.T.expand(7, 1, -1, -1))


def test_lemma_1_does_not_hold_where_position_rows_have_changed():
    """Its remark "token-independent" needs one-hot position rows, as in a first layer."""
    from infoflow_lens.studies.constructions import Head

    task = load_task("template_matching", **TM)
    alpha = torch.diag(torch.ones(3), diagonal=1)
    first = CONSTRUCTIONS["constrained_attention"].build(task)
    second = CONSTRUCTIONS["instructive_attention"].build(task, alpha=alpha)
    stacked = AttentionOnly(first.rows, (*first.layers, *second.layers), first.classifier)
    _, cache = stacked.host().run_with_cache(task.sample(7, seed=0)[0])
    assert isinstance(second.layers[0][0], Head)
    assert not cache["pattern", 1].allclose(alpha.T.expand(7, 1, -1, -1))


def test_lemma_2_attends_to_equal_tokens_between_allowed_positions():
    allowed = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    model, task = build_construction("constrained_attention", **TM, allowed=allowed)
    x, _ = task.sample(50, seed=0)
    _, cache = model.run_with_cache(x)
    equal = x[:, :, None] == x[:, None]
    assert cache["pattern", 0][:, 0].equal((equal & allowed.T).float())


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("in_contxt_qa", {}, "unknown construction .* did you mean 'in_context_qa'"),
        ("in_context_qa", {"n_pair": 2}, "did you mean 'n_pairs'"),
        ("in_context_qa_softmax", {"betta": 2}, "did you mean 'beta'"),
        ("in_context_qa", {"n_pairs": 200}, "too few for n_pairs 200"),
        ("template_matching_one_layer", {"length": 1}, "length is 1"),
        ("in_context_template_matching", {"gain": 0.5}, r"gain is 0\.5"),
        ("instructive_attention", {"alpha": torch.ones(3, 3)}, r"alpha is of shape \(3, 3\)"),
        ("instructive_attention", {"alpha": -torch.ones(4, 4)}, "least entry -1"),
        ("constrained_attention", {"allowed": torch.ones(4, 4)}, "allowed is torch.float32"),
    ],
)
def test_bad_parameters_are_named(name, parameters, message):
    with pytest.raises(InfoFlowError, match=message):
        build_construction(name, **parameters)


@pytest.mark.parametrize(("form", "longest"), [("binary", 23), ("ternary", 13)])
def test_templates_are_told_apart_exactly_or_refused(form, longest):
    """|u|^2 / 2 passes what float64 holds beyond these lengths (findings T2)."""

    def sizes(k):
        different = "".join(chr(ord("a") + i) for i in range(k))
        templates = ("a" * k, "a" * (k - 1) + "b", "ab" + "a" * (k - 2), different)
        return {"n_words": 26, "length": k, "templates": templates, "form": form}

    model, task = build_construction("template_matching", **sizes(longest))
    x, y = task.sample(200, seed=0)
    logits = model(x)[:, -1]
    assert ((logits >= logits.gather(1, y[:, None])).sum(dim=1) == 1).all()
    with pytest.raises(InfoFlowError, match=r"up to 2\^52 only"):
        build_construction("template_matching", **sizes(longest + 1))


@pytest.mark.parametrize("name", ["d_retrieval", "intrinsic_dimension", "depth_separation"])
def test_a_beta_that_float32_cannot_hold_is_refused(name):
    """An error bound was said where scores overflow (findings T10)."""
    with pytest.raises(InfoFlowError, match=r"beta is 1e\+38"):
        build_construction(name, beta=1e38)


@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
def test_the_default_dtype_of_torch_is_the_users(name):
    """Some ended in an error of torch under torch.set_default_dtype(float64)."""
    sizes = next((small for other, _, small, *_ in EXACT if other == name), {})
    model, task = build_construction(name, **sizes)
    x, _ = task.sample(10, seed=0)
    with torch.no_grad():
        expected = model(x)
        torch.set_default_dtype(torch.float64)
        try:
            again, task = build_construction(name, **sizes)
            found = again(task.sample(10, seed=0)[0])
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected.double(), atol=0.02)

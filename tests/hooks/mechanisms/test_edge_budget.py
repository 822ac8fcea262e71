"""Edges kept within a budget: against all paths one by one, plain hooks, and a known circuit."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from infoflow_lens import InfoFlowError, load_any
from infoflow_lens.hooks import EdgeBudgetResult, measure_edge_budget
from infoflow_lens.hooks.mechanisms.budgets import _count_kept
from infoflow_lens.hooks.mechanisms.edges import EDGE_METHODS, methods_of, rank_edges
from tests.conftest import make_token_model, redraw_weights, some_of, spread
from tests.reference import families, zoo
from tests.reference.induction import induction_model, repeated_segments

N, HEADS, LAYERS = 5, 2, 3


@pytest.fixture(scope="module")
def model():
    made = make_token_model(
        n_layers=LAYERS, n_heads=HEADS, d_head=4, d_model=12, n_ctx=12, d_vocab=20
    )
    return redraw_weights(made, 5, 0.6)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(20, (10, N), generator=torch.Generator().manual_seed(1))


def measured(model, inputs, calibration, **options):
    return measure_edge_budget(model, inputs, calibration, **{"progress": False, **options})


@pytest.fixture(scope="module")
def found(model, tokens):
    return measured(model, tokens[:6], tokens[6:], budgets=(0.1, 0.25, 0.5), draws=2)


# The slow way: every path, and rows of patterns one by one


def edges_and_stays(kind, cache, sequence):
    """What each edge (layer, head, query, key) and each residual connection counts on a path."""
    edges, stays = {}, {}
    for layer, query in product(range(LAYERS), range(N)):
        block = f"blocks.{layer}"
        pattern = cache[f"{block}.attn.hook_pattern"][sequence].double()
        values = cache[f"{block}.attn.hook_v"][sequence].double()
        W_O = cache[f"W_O {layer}"].double()
        before = cache[f"{block}.hook_resid_pre"][sequence, query].double()
        after = before + cache[f"{block}.hook_attn_out"][sequence, query].double()
        parts = {
            (head, key): pattern[head, query, key] * values[key, head] @ W_O[head]
            for head, key in product(range(HEADS), range(query + 1))
        }
        if kind in ("product", "weakest"):
            stays[layer, query] = 1.0
            weighed = {at: float(pattern[at[0], query, at[1]]) for at in parts}
        elif kind == "product x norm":
            stays[layer, query] = 1.0
            weighed = {at: min(1.0, float(p.norm() / before.norm())) for at, p in parts.items()}
        elif kind == "rollout":
            stays[layer, query] = 0.5
            weighed = {at: float(pattern[at[0], query, at[1]]) / HEADS / 2 for at in parts}
        else:  # contributions: how much nearer a part brings the whole
            near = {
                at: max(0.0, float(after.abs().sum() - (p - after).abs().sum()))
                for at, p in (parts | {"itself": before}).items()
            }
            total = sum(near.values())
            stays[layer, query] = near.pop("itself") / total
            weighed = {at: value / total for at, value in near.items()}
        edges |= {(layer, head, query, key): value for (head, key), value in weighed.items()}
    return edges, stays


def paths_to(state):
    """All paths: in each layer, the last first, an edge or None for the residual connection."""

    def below(layer, query):
        if layer < 0:
            yield ()
            return
        for rest in below(layer - 1, query):
            yield (None, *rest)
        for head, key in product(range(HEADS), range(query + 1)):
            for rest in below(layer - 1, key):
                yield ((layer, head, query, key), *rest)

    return list(below(LAYERS - 1, state))


def by_paths(kind, cache, sequence, states):
    """The score of every edge on a path to one of the states."""
    edges, stays = edges_and_stays(kind, cache, sequence)
    scores = {}
    for state in states:
        of_state = {}
        for path in paths_to(state):
            at, counts = state, []
            for layer, edge in zip(reversed(range(LAYERS)), path):
                counts.append(stays[layer, at] if edge is None else edges[edge])
                at = at if edge is None else edge[3]
            strength = min(counts) if kind == "weakest" else prod(counts)
            for edge in filter(None, path):
                if edge[2] == 0:
                    continue  # which sees itself alone, so that there is nothing to choose
                of_state.setdefault(edge, []).append(strength)
        summed = kind in ("rollout", "contributions")
        for edge, all_paths in of_state.items():
            scores[edge] = scores.get(edge, 0) + (sum if summed else max)(all_paths)
    return scores


def logits_with(model, row, kept, open_, means):
    """The logits of one sequence with patterns edited by plain hooks, row by row."""

    def hook_of(layer):
        def edit(pattern, hook):
            pattern = pattern.clone()
            for head, query in product(range(HEADS), range(N)):
                row = pattern[0, head, query]
                rest = [
                    key
                    for key in range(N)
                    if (layer, head, query, key) in open_ and (layer, head, query, key) not in kept
                ]
                if rest:
                    mean = means[layer][head, query, rest].float()
                    row[rest] = mean / mean.sum() * row[rest].sum()
            return pattern

        return f"blocks.{layer}.attn.hook_pattern", edit

    with torch.no_grad():
        return model.run_with_hooks(row[None], fwd_hooks=[hook_of(i) for i in range(LAYERS)])[0]


def loss_with(model, row, *edit):
    """The next-token losses of one sequence, so edited."""
    return cross_entropy(logits_with(model, row, *edit)[:-1], row[1:], reduction="none").double()


@pytest.fixture(scope="module")
def cache(model, tokens):
    with torch.no_grad():
        found = dict(model.run_with_cache(tokens)[1])
    return found | {f"W_O {i}": block.attn.W_O.detach() for i, block in enumerate(model.blocks)}


def means_of(cache):
    return [cache[f"blocks.{i}.attn.hook_pattern"][6:].double().mean(dim=0) for i in range(LAYERS)]


KINDS = ("product", "weakest", "product x norm", "rollout", "contributions")
READ = (None, (2,))


@pytest.mark.parametrize(
    ("kind", "read"), some_of(list(product(KINDS, READ)), *spread(KINDS, READ))
)
def test_the_best_edges_of_all_paths_kept_by_plain_hooks(model, tokens, cache, kind, read):
    """Scores by enumerating paths, patterns edited by hand: the same losses."""
    budgets = (1, 4, 9, 20)
    found = measured(
        model, tokens[:2], tokens[6:], methods=(kind,), budgets=budgets, read=read
    )  # fmt: skip
    states = range(N - 1) if read is None else read
    for sequence in range(2):
        scores = by_paths(kind, cache, sequence, states)
        best = sorted(scores, key=scores.get, reverse=True)
        assert int(found.n_edges[sequence]) == len(best)
        for row, budget in enumerate(budgets):
            # where equal scores lie on both sides of the budget, either edge may be kept
            if np.isclose(scores[best[budget - 1]], scores[best[budget]], rtol=1e-5, atol=1e-9):
                continue
            lost = loss_with(model, tokens[sequence], best[:budget], scores, means_of(cache))
            expected = lost[list(states)].sum()
            torch.testing.assert_close(
                found.losses[0, row, sequence], expected, rtol=1e-5, atol=1e-5
            )


def test_no_edge_is_mean_patterns_and_all_edges_are_the_model(model, tokens, cache):
    found = measured(model, tokens[:6], tokens[6:], budgets=(10**6,), draws=1)
    assert found.losses.equal(found.bare.expand_as(found.losses))  # bit for bit
    assert found.kept.equal(found.n_edges[None])
    hooks = [
        (f"blocks.{i}.attn.hook_pattern", lambda p, hook, m=mean: m.to(p).expand_as(p))
        for i, mean in enumerate(means_of(cache))
    ]
    with torch.no_grad():
        plain, mean = model(tokens[:6]), model.run_with_hooks(tokens[:6], fwd_hooks=hooks)
    for logits, expected in ((plain, found.bare), (mean, found.none)):
        loss = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:6, 1:], reduction="none")
        torch.testing.assert_close(loss.double().sum(dim=1), expected, rtol=1e-5, atol=1e-5)
    assert found.worth == pytest.approx(float((found.none - found.bare).sum()) / 24)


def test_divergence_at_one_state(model, tokens, cache):
    """With `read` and "kl": the distribution at one position, and edges on paths to it alone."""
    found = measured(
        model, tokens[:2], tokens[6:], methods=("rollout",), budgets=(3,), metric="kl", read=(-1,)
    )
    assert found.bare.tolist() == [0, 0]
    assert found.n_tokens.tolist() == [1, 1]
    for sequence in range(2):
        scores = by_paths("rollout", cache, sequence, (N - 1,))
        best = sorted(scores, key=scores.get, reverse=True)[:3]
        assert int(found.n_edges[sequence]) == len(scores)
        own, edited = (
            logits_with(model, tokens[sequence], kept, scores, means_of(cache))[-1]
            .double()
            .log_softmax(dim=-1)
            for kept in (scores, best)
        )
        expected = (own.exp() * (own - edited)).sum()
        torch.testing.assert_close(found.losses[0, 0, sequence], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "moved"), [("gradient", lambda p, m: p), ("gradient x change", lambda p, m: p - m)]
)
def test_gradients_are_those_of_autograd(model, tokens, cache, method, moved):
    """The best edges by |gradient of the loss x what is moved|, by hooks that keep the pattern."""
    patterns = {}

    def keep(pattern, hook):
        patterns[hook.name] = pattern.detach().requires_grad_()
        return patterns[hook.name]

    names = [f"blocks.{i}.attn.hook_pattern" for i in range(LAYERS)]
    found = measured(model, tokens[:2], tokens[6:], methods=(method,), budgets=(6,))
    for sequence in range(2):
        grads = []
        for name in names:  # one layer at a time: a leaf cuts the graph below it
            with torch.enable_grad():
                logits = model.run_with_hooks(tokens[sequence][None], fwd_hooks=[(name, keep)])
                cross_entropy(logits[0, :-1], tokens[sequence, 1:], reduction="sum").backward()
            grads.append(patterns[name].grad[0])
        scores = {
            (layer, head, query, key): float(
                abs(
                    grads[layer][head, query, key]
                    * moved(
                        cache[names[layer]][sequence, head, query, key],
                        means_of(cache)[layer][head, query, key],
                    )
                )
            )
            for layer, head, query in product(range(LAYERS), range(HEADS), range(1, N - 1))
            for key in range(query + 1)
        }
        best = sorted(scores, key=scores.get, reverse=True)
        expected = loss_with(model, tokens[sequence], best[:6], scores, means_of(cache)).sum()
        torch.testing.assert_close(found.losses[0, 0, sequence], expected, rtol=1e-5, atol=1e-5)
    model.zero_grad()


def test_places_are_a_nested_order_of_open_edges_and_equal_ones_fall_at_random():
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randint(4, (3, h, 4, 4), generator=generator).float() for h in (2, 3)]
    open_ = [torch.ones(3, 4, 4).tril().bool(), torch.ones(3, 4, 4).bool()]
    open_[1][2] = False
    places, counts = rank_edges(scores, open_, [7, 8, 9])
    assert counts.tolist() == [20 + 48, 20 + 48, 20]
    for i in range(3):
        ranks = torch.cat([p[i].flatten() for p in places])
        values = torch.cat([s[i].flatten() for s in scores])
        of_open = ranks[ranks >= 0]
        assert sorted(of_open.tolist()) == list(range(int(counts[i])))
        assert values[ranks.argsort()][ranks.sort().values >= 0].diff().le(0).all()
        for place, keys in zip(places, open_):
            assert (place[i] >= 0).equal(keys[i].expand(place.shape[1:]))
    again, _ = rank_edges(scores, open_, [1, 8, 2])
    assert not again[0][0].equal(places[0][0])
    assert again[0][1].equal(places[0][1])


def test_padding_and_batches_change_nothing(model, tokens):
    """Each sequence keeps what it keeps alone."""
    rows = [tokens[0], tokens[1, :3]]
    options = {"budgets": (0.4,), "draws": 1}
    together = measured(model, rows, tokens[6:], **options)
    by_one = measured(model, rows, tokens[6:], batch_size=1, **options)
    torch.testing.assert_close(by_one.losses, together.losses, rtol=1e-5, atol=1e-5)
    assert together.n_tokens.tolist() == [4, 2]
    # the others depend on the place of a sequence; strengths by norm are at most 1, so some tie
    drawn = ("another window", "chance", "product x norm", "weight x norm")
    fixed = tuple(m for m in EDGE_METHODS if m not in drawn)
    rows_of_fixed = [EDGE_METHODS.index(m) for m in fixed]
    alone = measured(model, rows[1][None], tokens[6:], methods=fixed, **options)
    assert alone.kept[:, 0].equal(together.kept[:, 1])
    assert alone.n_edges[0] == together.n_edges[1]
    torch.testing.assert_close(
        alone.losses[..., 0], together.losses[rows_of_fixed, :, 1], rtol=1e-4, atol=1e-4
    )


def test_another_window_knows_positions_alone(model, tokens):
    """Its edges are those of a calibration sequence, so they are the same whatever is judged."""
    options = {"budgets": (5,), "methods": ("product", "another window")}
    found = measured(model, tokens[:2], tokens[:2].clone(), **options)
    torch.testing.assert_close(found.losses[0], found.losses[1], rtol=1e-6, atol=1e-6)
    other = measured(model, tokens[:2], tokens[[1, 0]], **options)
    assert not torch.allclose(other.losses[0], other.losses[1])


def test_another_window_of_an_encoder_is_the_same_whatever_the_batch():
    """It was as long as the longest of the batch, and an encoder's queries see all of it."""
    encoder, ids = families.build("bert"), families.tokens(9)
    options = {"budgets": (0.3,), "methods": ("another window",), "metric": "kl"}
    rows = [ids[0], ids[1, :4]]
    one, both = (measured(encoder, rows, ids, batch_size=size, **options) for size in (1, 2))
    assert one.kept.equal(both.kept)
    torch.testing.assert_close(one.losses, both.losses, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("head", ["SequenceClassification", "QuestionAnswering"])
def test_a_model_of_one_output_for_a_sequence_is_refused(head):
    plain, ids = families.build("gpt2", auto=(f"AutoModelFor{head}",)), families.tokens(5)
    with pytest.raises(InfoFlowError, match="edges are counted on paths to states with logits"):
        measured(plain, ids, ids, metric="kl")


def test_it_goes_on_where_it_stopped(model, tokens):
    kept, ran = [], []
    options = {"budgets": (0.25, 0.5), "draws": 2, "methods": ("product", "gradient", "chance")}
    found = measured(model, tokens[:3], tokens[6:], after=kept.append, **options)
    again = measured(model, tokens[:3], tokens[6:], resume=kept[3], after=ran.append, **options)
    assert again.losses.equal(found.losses)
    assert len(ran) == len(kept) - 4


def test_the_table_the_picture_and_the_files(found, tmp_path):
    frame = found.to_frame().set_index(["method", "budget"])
    at = frame.loc["rollout", 0.25]
    assert at["edges"] == found.kept[-2].double().mean()
    assert at["edges_per_state"] == pytest.approx(at["edges"] / 4)
    assert at["regained"] == pytest.approx((found.loss + found.worth - at["loss"]) / found.worth)
    (axes,) = found.plot().axes
    labels = [line.get_label() for line in axes.lines[:-1]]
    assert labels == [*EDGE_METHODS]  # draws of chance are one line
    found.save(tmp_path / "edges")
    loaded = EdgeBudgetResult.load(tmp_path / "edges")
    assert loaded.losses.equal(found.losses)
    assert str(loaded.edges_needed()) == str(found.edges_needed())  # NaN is NaN


def crossing(edges, regained, share):
    """The edges from which on a share is regained, between the last point below and the next."""
    last = max((i for i, value in enumerate(regained) if value < share), default=-1)
    if last < 0:
        return 0.0
    logs = np.log1p(edges)
    return np.expm1(np.interp(share, regained[last : last + 2], logs[last : last + 2]))


def test_edges_needed_lie_between_two_budgets_and_intervals_come_from_windows(found):
    """Against a loop over draws of windows."""
    generator = torch.Generator().manual_seed(0)
    n = 40
    bare, none = torch.rand(n, generator=generator) + 1, torch.rand(n, generator=generator) + 4
    share = torch.tensor([0.2, 0.8, 0.7, 0.95])[:, None]  # it falls between two budgets
    noise = 0.3 * torch.randn(4, n, generator=generator)
    losses = none - share * (none - bare) + noise
    made = replace(
        found, methods=("rollout",), budgets=(4.0, 16.0, 64.0, 256.0), bare=bare.double(),
        none=none.double(), losses=losses[None].double(), n_edges=torch.full((n,), 1000),
        kept=torch.tensor([4, 16, 64, 256])[:, None].expand(4, n),
    )  # fmt: skip
    (needed,) = made.edges_needed(0.75, draws=2000).values()
    edges = np.array([0, 4, 16, 64, 256, 1000.0])

    def of(windows):
        lost = (none[windows] - losses[:, windows]).sum(dim=1)
        worth = (none[windows] - bare[windows]).sum()
        return crossing(edges, np.array([0, *(lost / worth).tolist(), 1]), 0.75)

    assert needed.edges == pytest.approx(of(torch.arange(n)))
    drawn = [of(torch.randint(n, (n,), generator=generator)) for _ in range(2000)]
    assert 64 < needed.low < needed.edges < needed.high < 256
    expected = np.quantile(drawn, [0.025, 0.975])
    assert [needed.low, needed.high] == pytest.approx(list(expected), rel=0.05)
    assert made.times_needed("rollout", "rollout") == (1, 1, 1)
    one = {
        name: getattr(made, name)[..., :1] for name in ("bare", "none", "losses", "kept", "n_edges")
    }
    (alone,) = replace(made, **one).edges_needed(0.75).values()
    assert alone.edges == pytest.approx(of(torch.tensor([0])))
    assert np.isnan([alone.low, alone.high]).all()  # it had the width 0
    with pytest.raises(InfoFlowError, match="'product' was not measured: expected one of rollout"):
        made.times_needed("product", "rollout")


def test_where_attention_is_worth_nothing_no_number_of_edges_is_needed(found):
    made = replace(found, none=found.bare - 1)
    assert all(np.isnan(needed.edges) for needed in made.edges_needed().values())


def test_an_induction_circuit_needs_its_own_edges():
    """At a state that has an answer, one edge of each layer finds it, and one more stays inside.

    Query t of layer 1 looks behind the earlier occurrence of its token; that position looks at
    the one before, as t itself does. These are all edges of weight 1 on paths to the state.
    """
    model, (tokens, _) = induction_model(11, 9), repeated_segments(11, 60)
    options = {"read": (-2,), "budgets": (1, 2, 3, 8), "methods": EDGE_METHODS}
    found = measured(model, tokens[:30], tokens[30:], **options)
    regained = dict(zip(found.methods, found.regained().tolist()))
    for graded in ("product", "weakest", "product x norm"):
        assert regained[graded][2] > 0.99, graded
    needed = found.edges_needed(0.9)
    assert str(found.edges_needed()) == str(needed)  # as it is by default
    assert needed["product"].edges <= 3
    # all positions look at the one before, so weights alone cannot tell which of them matter
    assert needed["attention weight"].edges > 3
    assert regained["chance 0"][3] < 0.5


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_models_whose_rows_or_norms_are_others(name):
    """Sinks: rows of GPT-OSS sum to less than 1. Gemma 2 has norms on what heads add."""
    model, ids = load_any(zoo.build(name)).model, zoo.tokens(4, 8)
    of_parts = ("contributions", "product x norm", "weight x norm")
    assert set(of_parts) <= set(methods_of(model))
    found = measured(model, ids[:2], ids[2:], methods=of_parts, budgets=(10**6,))
    assert found.losses.equal(found.bare.expand_as(found.losses))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": (0.5, 2)}, r"\[0.5, 2.0\]: expected shares of all edges below 1, or numbers"),
        ({"budgets": (1.5,)}, "expected whole numbers of edges"),
        ({"read": (-1,)}, "position -1: expected one with a next token .*use metric 'kl'"),
        ({"methods": ("flow",)}, "methods"),
        ({"methods": ()}, "expected a method that chooses edges, or at least"),
        ({"methods": ("chance",), "draws": 0}, "expected a method that chooses edges, or at"),
    ],
)
def test_what_makes_no_sense_is_refused(model, tokens, options, message):
    with pytest.raises(InfoFlowError, match=message):
        measured(model, tokens[:6], tokens[6:], **options)


def test_parts_that_a_hook_changes_are_refused(model, tokens):
    """What heads bring then is not what attention adds."""
    model.add_hook("blocks.1.hook_attn_out", lambda added, hook: 2 * added)
    try:
        with pytest.raises(InfoFlowError, match="in layer 1 what the heads bring does not add up"):
            measured(model, tokens[:2], tokens[6:], methods=("product x norm",))
    finally:
        model.reset_hooks()


def test_models_and_sequences_that_do_not_fit_are_refused(model, tokens):
    with pytest.raises(InfoFlowError, match="calibration has sequences of at most 4 positions"):
        measured(model, tokens[:6], tokens[6:, :4])
    ids = zoo.tokens(4, 6)
    for name, message in (("gpt_neo", "do not reach the output"), ("bert", "later keys")):
        with pytest.raises(InfoFlowError, match=message):
            measured(zoo.bridge(name), ids[:2], ids[2:])


@pytest.mark.parametrize("budgets", [(0.1, 0.5), (1, 4)])
def test_no_more_edges_are_kept_than_there_are(budgets):
    """Of a sequence with nothing to choose one edge was said to be kept."""
    n_edges = torch.tensor([0, 1, 20])
    kept = _count_kept(budgets, n_edges)
    assert (kept <= n_edges).all()
    assert kept[:, 0].eq(0).all()
    assert kept[:, 1].eq(1).all()

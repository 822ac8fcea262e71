"""The study of C.1 and C.2: its rule, what a row says of a head, and what that is checked by."""

import pandas as pd
import pytest
import torch

from infoflow_lens import Architecture, RecoveryProbe, build_model, load_task, run_probes
from infoflow_lens.studies.papers import find_study
from infoflow_lens.studies.papers.first_layer import (
    CLS,
    TOKENS,
    first_layer,
    lost_without,
    recovery_rows,
)
from infoflow_lens.training import nmse

STUDY = find_study("max_position_recovery")


def frame(first, second, heads="2 2", run=0, target="pairs", error=1e-4, lost=(1.0, 1.0, 1.0)):
    """Heads with these ratios at tokens; at CLS none of them does anything."""
    return pd.DataFrame(
        [
            {"run": run, "seed": run, "target": target, "D": 2, "heads": heads, "head": head,
             "queries": queries, "rank": rank, "nmse": error, "entropy": 0.1, "largest": 0.9,
             "entropy_initial": 2.0, "lost_without": lost[head] if queries == TOKENS else 0.0,
             "ratio": ratio if queries == TOKENS else 0.9, "tempered_ratio": 0.1,
             **{f"{stage}_{name}": 0.4 * ratio for stage in ("initial", "trained", "tempered")
                for name in ("second_moment", "fvu")}}
            for rank, ratios in ((1, first), (2, second))
            for head, ratio in enumerate(ratios)
            for queries in (TOKENS, CLS)
        ]
    )  # fmt: skip


def passing():
    return pd.concat([frame((0.05, 0.06), (1.0, 0.9)), frame((0.9,), (1.0,), heads="1 3", run=1)])


@pytest.mark.parametrize(
    ("first", "second", "passed"),
    [
        ((0.05, 0.09), (0.9, 1.1), True),
        ((0.05, 0.11), (0.9, 1.1), False),  # a head above the published level
        ((0.05, 0.09), (0.5, 0.6), False),  # the second token is read, too
        ((0.05, 0.09), (1.3, 1.2), True),  # it is lost, which speaks for the theory
    ],
)
def test_the_verdict_follows_the_stated_rule(first, second, passed):
    assert STUDY.verdict(frame(first, second)).passed is passed


def test_fewer_heads_and_other_targets_are_not_judged():
    others = [
        frame((0.9,), (1.0,), heads="1 3", run=1),
        frame((0.9, 0.9), (1.0, 1.0), run=2, target="single tokens"),
    ]
    assert STUDY.verdict(pd.concat([frame((0.05, 0.06), (1.0, 1.0)), *others])).passed
    assert not STUDY.verdict(pd.concat(others)).passed


def test_the_seed_of_least_error_is_judged_and_all_are_told():
    two = pd.concat(
        [frame((0.05, 0.06), (1.0, 1.0)), frame((0.5, 0.6), (1.0, 1.0), run=1, error=1e-2)]
    )
    verdict = STUDY.verdict(two)
    assert verdict.passed
    assert "all seeds: 2 of 4 below 0.1, the largest 0.600" in verdict.remarks
    assert not STUDY.verdict(two.assign(nmse=1 - two["nmse"])).passed


def test_heads_that_do_nothing_are_marked_and_not_judged():
    idle = frame((0.05, 0.06, 0.9), (1.0, 1.0, 1.0), heads="3 2", lost=(1.0, 1.0, 0.005))
    assert STUDY.verdict(idle).passed
    assert not STUDY.verdict(idle.assign(lost_without=0.0)).passed  # nothing in use, nothing seen


ARCHITECTURE = Architecture(n_heads=(2, 1), d_model=12, d_head=(4, 4), d_token=2, n_tokens=5)


@pytest.fixture(scope="module")
def models():
    """One with nearly even attention, and one with peaks."""
    initial, trained = (build_model(ARCHITECTURE, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        trained.blocks[0].attn.W_Q.mul_(200)
        trained.blocks[0].attn.W_O[1] = 0  # the second head says nothing
    return initial, trained


@pytest.fixture(scope="module")
def data():
    return load_task("intrinsic_dimension", n_tokens=5, d_token=2, n_components=2).sample(400, 0)


@pytest.fixture(scope="module")
def rows(models, data):
    return pd.DataFrame(recovery_rows(*models, *data))


def test_errors_at_tokens_are_those_of_the_recovery_probe(models, data, rows):
    x = data[0]
    held_out = torch.arange(len(x)) % 4 == 3
    for stage, model in zip(("initial", "trained"), models, strict=True):
        (probed,) = run_probes(
            model, x[~held_out], [RecoveryProbe((1, 2))], x[held_out], progress=False
        )
        for error in ("second_moment", "fvu"):
            expected = getattr(probed, error)[0].flatten().tolist()
            mine = rows[rows["queries"] == TOKENS].sort_values(["head", "rank"])
            assert mine[f"{stage}_{error}"].tolist() == pytest.approx(expected, rel=1e-6)


def test_at_cls_the_choice_is_that_of_cls(models, data):
    seen = first_layer(models[1], data[0])
    scores = seen.scores[:, :, -1, :5]
    assert torch.equal(seen.chosen(1)[:, :, -1], scores.argmax(dim=-1))
    two = scores.sort(dim=-1, descending=True).indices[..., 1]
    assert torch.equal(seen.chosen(2)[:, :, -1], two)


def test_tempered_heads_keep_their_choices_and_take_the_entropy(models, data):
    initial, trained = (first_layer(model, data[0]) for model in models)
    asked = {q: [trained.entropy(head, q) for head in (0, 1)] for q in (TOKENS, CLS)}
    peaked = first_layer(models[0], data[0], initial.temper(asked))
    for queries, entropies in asked.items():
        for head, entropy in enumerate(entropies):
            assert peaked.entropy(head, queries) == pytest.approx(entropy, abs=1e-3)
            assert initial.entropy(head, queries) > entropy + 0.1
    assert torch.equal(peaked.pattern.argmax(dim=-1), initial.scores.argmax(dim=-1))
    assert not torch.equal(peaked.state, initial.state)


def test_a_head_that_writes_nothing_is_lost_without_a_trace(models, data):
    for queries in (TOKENS, CLS):
        assert lost_without(models[1], *data, 1, queries) == 0
        assert lost_without(models[1], *data, 0, queries) != 0


def test_what_is_lost_is_the_error_of_an_edited_model(models, data):
    """By hand: the contribution of the head to the residual stream, replaced by its mean."""
    model, (x, y) = models[1], data
    with torch.no_grad():
        output, cache = model.run_with_cache(x)
        z, residual = cache["blocks.0.attn.hook_z"], cache["blocks.0.hook_resid_mid"].clone()
        own = z[:, :5, 0] @ model.blocks[0].attn.W_O[0]
        residual[:, :5] += own.mean(dim=(0, 1)) - own
        edited = model.run_with_hooks(
            x, fwd_hooks=[("blocks.0.hook_resid_mid", lambda value, hook: residual)]
        )
    expected = nmse(edited, y) - nmse(output, y)
    assert lost_without(model, x, y, 0, TOKENS) == pytest.approx(expected, rel=1e-4)

"""No sequence is judged by a mean pattern that it is in; errors tell what other sequences give."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import t

from infoflow_lens import InfoFlowError
from infoflow_lens.hooks import measure_mechanisms
from infoflow_lens.hooks.interventions.patterns import IDEALS, ideal_pattern, mean_without
from tests.conftest import make_token_model, some_of

MEAN, MAX = IDEALS.index("specific_position"), IDEALS.index("max_position")
EXACT = {"progress": False}


@pytest.fixture(scope="module")
def model():
    """Its heads look where the tokens tell, so that every mean pattern is of a few sequences."""
    made = make_token_model(n_layers=2, n_heads=2, d_model=12, n_ctx=9)
    with torch.no_grad():
        for block in made.blocks:
            block.attn.W_Q.mul_(6)
            block.attn.W_K.mul_(6)
            block.attn.W_V.mul_(4)
    return made


def ids(n, seed=0):
    return torch.randint(17, (n, 9), generator=torch.Generator().manual_seed(seed))


def patterns_of(model, tokens, layer):
    with torch.no_grad():
        return model.run_with_cache(tokens)[1][f"blocks.{layer}.attn.hook_pattern"]


def damage_by_hand(model, tokens, layer, head, means):
    """The divergence with the head's pattern replaced, by plain hooks, sequence by sequence."""
    lost = []
    for row, mean in zip(tokens, means, strict=True):

        def put(pattern, hook, mean=mean):
            pattern = pattern.clone()
            pattern[:, head] = mean
            return pattern

        with torch.no_grad():
            before = model(row[None]).log_softmax(-1)
            hooks = [(f"blocks.{layer}.attn.hook_pattern", put)]
            after = model.run_with_hooks(row[None], fwd_hooks=hooks).log_softmax(-1)
        lost.append(float((before.exp() * (before - after)).sum(-1).mean()))
    return sum(lost) / len(lost)


@pytest.mark.parametrize(("layer", "head"), some_of([(0, 1), (1, 0)], (0, 1)))
def test_each_sequence_is_judged_by_the_mean_pattern_of_the_others(model, layer, head):
    tokens, others = ids(5), ids(7, seed=1)
    own, elsewhere = (patterns_of(model, t, layer)[:, head] for t in (tokens, others))
    means = {
        "all": [own.mean(dim=0)] * 5,
        "others": [torch.cat([own[:i], own[i + 1 :]]).mean(dim=0) for i in range(5)],
        "calibration": [elsewhere.mean(dim=0)] * 5,
    }
    expected = {name: damage_by_hand(model, tokens, layer, head, m) for name, m in means.items()}
    found = {
        "all": measure_mechanisms(model, tokens, held_out=False, **EXACT),
        "others": measure_mechanisms(model, tokens, batch_size=2, **EXACT),
        "calibration": measure_mechanisms(model, tokens, calibration=others, **EXACT),
    }
    for name, result in found.items():
        measured = float(result.damage[layer][head, MEAN])
        assert measured == pytest.approx(expected[name], rel=1e-3)
    # the same few sequences flatter the mean pattern; other ideals do not know the difference
    assert expected["all"] < 0.95 * min(expected["others"], expected["calibration"])
    rest = [i for i in range(len(IDEALS)) if i != MEAN]
    for other in ("all", "calibration"):
        torch.testing.assert_close(
            found["others"].damage[layer][:, rest], found[other].damage[layer][:, rest]
        )
    records = {name: result.record.config for name, result in found.items()}
    assert [records[name]["held_out"] for name in found] == [False, True, True]
    assert [records[name]["n_calibration"] for name in found] == [None, None, 7]


def test_what_no_other_sequence_has_is_looked_at_evenly():
    """The second query is of this sequence alone, so nothing is known of where it looks."""
    pattern = torch.tensor([[1.0, 0.0], [0.9, 0.1]])
    visible = torch.ones(2, 2, dtype=torch.bool).tril()
    mean = torch.tensor([[1.0, 0.0], [0.9, 0.1]])
    others = mean_without(mean, torch.tensor([3, 1]), pattern)
    made = ideal_pattern(pattern, visible, "specific_position", others)
    torch.testing.assert_close(made, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))


def test_sequences_of_different_lengths_leave_themselves_out(model):
    tokens = [row[:n] for row, n in zip(ids(4), (9, 6, 4, 6), strict=True)]
    found = measure_mechanisms(model, tokens, **EXACT)
    own = [patterns_of(model, row[None], 1)[0, 1] for row in tokens]
    expected = 0.0
    for i, row in enumerate(tokens):
        mean = torch.zeros(len(row), len(row))
        for query in range(len(row)):
            rows = [p[query] for j, p in enumerate(own) if j != i and len(p) > query]
            if rows:
                padded = [torch.nn.functional.pad(r, (0, 9 - len(r))) for r in rows]
                mean[query] = torch.stack(padded).mean(dim=0)[: len(row)]
            else:
                mean[query, : query + 1] = 1 / (query + 1)
        expected += damage_by_hand(model, row[None], 1, 1, [mean]) * len(row)
    measured = float(found.damage[1][1, MEAN])
    assert measured == pytest.approx(expected / sum(map(len, tokens)), rel=1e-3)


def test_all_ideals_that_are_enough_are_told(model):
    tokens = ids(30)
    exact = measure_mechanisms(model, tokens, **EXACT)
    damage = torch.cat(exact.damage)
    threshold = float(damage.flatten().quantile(0.6))  # several are enough for some heads
    found = measure_mechanisms(model, tokens, threshold=threshold, progress=False)
    told = torch.cat(found.sufficient)
    assert told.equal(damage <= threshold)
    assert int(told.sum(dim=1).max()) > 1
    frame = found.to_frame()
    for i, ideal in enumerate(IDEALS):
        assert frame[f"sufficient_{ideal}"].tolist() == told[:, i].tolist()
    first = [IDEALS[int(row.long().argmax())] if row.any() else "soft" for row in told]
    assert frame["mechanism"].tolist() == first


def test_few_sequences_leave_more_open(model):
    """The interval of 1.96 errors over three sequences holds the truth in four of five."""
    few = measure_mechanisms(model, ids(3), **EXACT)
    damage, error = torch.cat(few.damage), torch.cat(few.error)
    for errors, is_sure in ((4.29, False), (4.32, True)):
        apart = tuple(errors * layer for layer in few.error)
        sure = torch.cat(replace(few, threshold=0.0, damage=apart).certain)
        assert sure.equal(torch.full_like(sure, is_sure) & (error > 0))
    assert torch.cat(few.certain).equal((damage - few.threshold).abs() > t.ppf(0.975, 2) * error)


def test_a_calibration_that_is_too_short_is_refused(model):
    with pytest.raises(InfoFlowError, match="at most 8 positions, the inputs have 9"):
        measure_mechanisms(model, ids(4), calibration=ids(4)[:, :8], progress=False)

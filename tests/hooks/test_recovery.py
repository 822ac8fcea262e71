"""Recovery maps equal scikit-learn's on cached activations."""

import numpy as np
import pytest
import torch
from infoflow_lens.hooks import PositionsProbe
from sklearn.linear_model import LinearRegression

from infoflow_lens import InfoFlowError, InfoFlowWarning, RecoveryProbe, attach, run_probes
from tests.conftest import D_TOKEN, HEADS, N_TOKENS, make_token_model

RANKS = (1, 2, 4)


@pytest.fixture
def many_inputs():
    return torch.randn(60, N_TOKENS, D_TOKEN, generator=torch.Generator().manual_seed(9))


def by_scikit_learn(x, y, fit_rows, eval_rows):
    """Second-moment error and variance unexplained of one map."""
    model = LinearRegression().fit(x[fit_rows].flatten(0, -2), y[fit_rows].flatten(0, -2))
    target = y[eval_rows].flatten(0, -2).numpy()
    error = ((model.predict(x[eval_rows].flatten(0, -2)) - target) ** 2).sum()
    return error / (target**2).sum(), error / ((target - target.mean(0)) ** 2).sum()


def test_equals_scikit_learn_on_cached_activations(model, many_inputs):
    model.to(torch.float64, print_details=False)
    x = many_inputs.double()
    result, attended = run_probes(
        model, x, [RecoveryProbe(RANKS), PositionsProbe(RANKS)], batch_size=7, progress=False
    )
    _, cache = model.run_with_cache(x)
    held_out = torch.arange(60) % 5 == 4
    frame = result.to_frame().set_index(["layer", "head", "rank"])
    for layer, heads in enumerate(HEADS):
        state = cache[f"blocks.{layer}.hook_resid_mid"][:, :N_TOKENS]
        for head in range(heads):
            for column, rank in enumerate(RANKS):
                keys = attended.positions[layer][:, head, :N_TOKENS, column].long()
                target = torch.gather(x, 1, keys.unsqueeze(-1).expand(-1, -1, D_TOKEN))
                expected = by_scikit_learn(state, target, ~held_out, held_out)
                found = frame.loc[(layer, head, rank), ["second_moment", "fvu"]]
                np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert result.n_fit[layer] == 48 * N_TOKENS
        assert result.n_eval[layer] == 12 * N_TOKENS


def test_a_causal_model_over_token_ids_recovers_embeddings(token_inputs):
    token_model = make_token_model().to(torch.float64)
    result, attended = run_probes(
        token_model, token_inputs, [RecoveryProbe((1, 2)), PositionsProbe((1, 2))], progress=False
    )
    _, cache = token_model.run_with_cache(token_inputs)
    held_out = torch.arange(19) % 5 == 4
    queries = slice(1, None)  # query 0 has a single key, so no rank 2
    for column in (0, 1):
        keys = attended.positions[1][:, 3, queries, column].long()
        embedded = torch.gather(cache["hook_embed"], 1, keys.unsqueeze(-1).expand(-1, -1, 12))
        state = cache["blocks.1.hook_resid_mid"][:, queries]
        expected = by_scikit_learn(state, embedded, ~held_out, held_out)
        found = (result.second_moment[1][3, column], result.fvu[1][3, column])
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert result.n_fit == (16 * 8, 16 * 8)


@pytest.mark.parametrize("changes", [{"attn_only": True}, {"parallel_attn_mlp": True}])
def test_blocks_without_resid_mid_use_the_same_state(token_inputs, changes):
    """x' = resid_pre + attn_out there; in attention-only blocks it is also resid_post."""
    model = make_token_model(**changes)
    (result,) = run_probes(model, token_inputs, [RecoveryProbe()], progress=False)
    _, cache = model.run_with_cache(token_inputs)
    state = cache["blocks.0.hook_resid_pre"] + cache["blocks.0.hook_attn_out"]
    if changes.get("attn_only"):
        torch.testing.assert_close(state, cache["blocks.0.hook_resid_post"])
    keys = cache["blocks.0.attn.hook_attn_scores"][:, 1].argmax(-1)
    target = torch.gather(cache["hook_embed"], 1, keys.unsqueeze(-1).expand(-1, -1, 12))
    held_out = torch.arange(19) % 5 == 4
    _, fvu = by_scikit_learn(state.double(), target.double(), ~held_out, held_out)
    assert float(result.fvu[0][1, 0]) == pytest.approx(fvu, rel=1e-4)


def test_what_the_state_holds_linearly_is_recovered_and_the_rest_is_not():
    """Every token attends to itself alone (rank 1): the residual stream gives it back."""
    from infoflow_lens import Architecture, build_model

    model = build_model(
        Architecture(n_heads=(1,), d_model=12, d_head=(4,), d_token=4, n_tokens=8, attn_scale=200.0)
    )
    with torch.no_grad():
        block = model.blocks[0].attn
        inverse = torch.linalg.pinv(model.embed.W_E)  # reads the token off the residual stream
        block.W_Q[0], block.W_K[0] = inverse, inverse
        block.b_Q.zero_()
    x = torch.randn(300, 8, 4, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True)  # on the sphere x(t).x(s) is largest at s = t
    result, attended = run_probes(
        model, x, [RecoveryProbe((1, 3)), PositionsProbe()], progress=False
    )
    assert attended.argmax[0][:, 0, :8].eq(torch.arange(8)).all()
    assert float(result.fvu[0][0, 0]) < 1e-5
    assert float(result.fvu[0][0, 1]) > 0.5


def test_the_batch_size_changes_nothing(model, many_inputs):
    results = [
        run_probes(model, many_inputs, [RecoveryProbe(RANKS)], batch_size=size, progress=False)[0]
        for size in (1, 7, 60)
    ]
    for other in results[1:]:
        for name in ("second_moment", "fvu"):
            for mine, theirs in zip(getattr(results[0], name), getattr(other, name), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_probes_on_shards_merge_to_the_probe_on_all(model, many_inputs):
    def probed(inputs, held_out):
        probe = RecoveryProbe(RANKS)
        run_probes(model, inputs, [probe], held_out, progress=False)
        return probe

    first = probed(many_inputs[:20], many_inputs[40:44])
    second = probed(many_inputs[20:40], many_inputs[44:])
    merged = second.merge(first).result()
    whole = probed(many_inputs[:40], many_inputs[40:]).result()
    assert merged.n_fit == whole.n_fit
    for mine, theirs in zip(merged.fvu, whole.fvu, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_maps_are_given_and_fit_the_frame(model, many_inputs):
    (result,) = run_probes(model, many_inputs, [RecoveryProbe((1,))], progress=False)
    _, cache = model.run_with_cache(many_inputs)
    state = cache["blocks.1.hook_resid_mid"][:, :N_TOKENS].double()
    keys = cache["blocks.1.attn.hook_attn_scores"][:, 4, :N_TOKENS].argmax(-1)
    target = torch.gather(many_inputs, 1, keys.unsqueeze(-1).expand(-1, -1, D_TOKEN)).double()
    predicted = state @ result.weight[1][4, 0] + result.bias[1][4, 0]
    held_out = torch.arange(60) % 5 == 4
    error = (predicted - target)[held_out].square().sum()
    expected = float(error / target[held_out].square().sum())
    assert float(result.second_moment[1][4, 0]) == pytest.approx(expected, rel=1e-6)
    assert list(result.to_frame().columns) == [
        "layer", "head", "rank", "second_moment", "fvu", "n_fit", "n_eval",
    ]  # fmt: skip


def test_fewer_rows_than_features_are_said(model, inputs):
    with pytest.warns(InfoFlowWarning) as warned:
        (result,) = run_probes(
            model, inputs[:2], [RecoveryProbe()], eval_inputs=inputs[2:], progress=False
        )
    assert "layer 1: rank-deficient fit, rank 13 of 30 features" in str(warned[1].message)
    assert result.gram_rank[1] == 2 * N_TOKENS - 1
    assert any("least norm" in note for note in result.notes)
    assert all(error.isfinite().all() for error in result.fvu)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_a_target_that_never_changes_has_no_variance_to_explain(size):
    model = make_token_model()
    x = torch.randint(17, (60, 9), generator=torch.Generator().manual_seed(0))
    x[:, 0] = 7

    def look_at_the_first(scores, hook):
        scores = scores.clone()
        scores[..., 0] = 100.0
        return scores

    hooks = [(f"blocks.{layer}.attn.hook_attn_scores", look_at_the_first) for layer in (0, 1)]
    with model.hooks(fwd_hooks=hooks):
        (result,) = run_probes(model, x, [RecoveryProbe()], batch_size=size, progress=False)
    assert all(fvu.isnan().all() for fvu in result.fvu)


def test_rows_left_out_are_counted(token_inputs):
    (result,) = run_probes(
        make_token_model(), token_inputs, [RecoveryProbe((1, 3))], progress=False
    )
    assert result.n_fit[0] + result.n_eval[0] == 19 * 7
    assert "layer 0: 38 rows left out" in result.notes[0]


@pytest.mark.parametrize("n", [1, 4])
def test_too_few_sequences_to_hold_one_out(model, inputs, n):
    with pytest.raises(InfoFlowError, match="0 held out"):
        run_probes(model, inputs[:n], [RecoveryProbe()], progress=False)


def test_no_held_out_sequence_in_the_users_own_loop(model, inputs):
    with attach(model, RecoveryProbe()) as probes:
        model(inputs[:3])
    with pytest.raises(InfoFlowError, match="0 held out"):
        probes[0].result()

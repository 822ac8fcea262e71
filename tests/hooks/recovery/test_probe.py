"""Recovery maps equal scikit-learn's on cached activations."""

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from sklearn.linear_model import LinearRegression, Ridge

from infoflow_lens import InfoFlowError, InfoFlowWarning, RecoveryProbe, attach, run_probes
from infoflow_lens.hooks import PositionsProbe, RecoveryResult
from infoflow_lens.hooks.model.semantics import attention_hooks
from infoflow_lens.hooks.recovery.rows import random_keys, sketch_matrix
from tests.conftest import D_TOKEN, HEADS, N_TOKENS, make_token_model, some_of
from tests.versions import for_each

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


@pytest.mark.parametrize(
    "changes", for_each([({"attn_only": True},), ({"parallel_attn_mlp": True},)])
)
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


def test_what_is_merged_does_not_grow_with_the_number_of_probes(model, many_inputs):
    def size(value):
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        return sum(map(size, value)) if isinstance(value, list) else getattr(value, "nbytes", 0)

    merged, sizes = RecoveryProbe(RANKS, buffer_rows=100), []
    for _ in range(12):
        part = RecoveryProbe(RANKS, buffer_rows=100)
        with attach(model, part), torch.no_grad():  # without a result, which would settle it
            model(many_inputs[:10])
        sizes.append(size(merged.merge(part).state_dict()["measured"]))
    assert max(sizes[6:]) <= 1.1 * max(sizes[:6])


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
        "second_moment_low", "second_moment_high", "fvu_low", "fvu_high",
    ]  # fmt: skip


def test_fewer_rows_than_features_are_said(model, inputs):
    with pytest.warns(InfoFlowWarning) as warned:
        (result,) = run_probes(
            model, inputs[:2], [RecoveryProbe()], eval_inputs=inputs[2:], progress=False
        )
    assert "rank-deficient fit, rank 9 of 30 features" in str(warned[0].message)
    assert len(warned) == 1  # of all layers
    assert result.n_features == (30, 30)
    assert result.gram_rank[1] == 2 * N_TOKENS - 1
    assert any("least norm" in note for note in result.notes)
    assert all(error.isfinite().all() for error in result.fvu)


@pytest.mark.parametrize("size", [1, 7, 60])
def test_a_target_that_never_changes_has_no_variance_to_explain(size):
    model = make_token_model()
    x = torch.randint(17, (60, 9), generator=torch.Generator().manual_seed(0))
    x[:, 0] = 7

    def look_at_the_first(shown, hook):
        shown = shown.clone()
        shown[..., 0] = 100.0
        return shown

    hooks = [(name, look_at_the_first) for name in attention_hooks(model, (0, 1))]
    with model.hooks(fwd_hooks=hooks):
        (result,) = run_probes(model, x, [RecoveryProbe()], batch_size=size, progress=False)
    assert all(fvu.isnan().all() for fvu in result.fvu)
    # it said that no head gives its token back better than the mean does
    assert result.sentences()[0].endswith("no token that a head attends to changes")


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


# Targets, sources, controls: all against scikit-learn on cached activations


class Reference:
    """A causal token model in float64, its cache, and what recovery means in plain words."""

    def __init__(self, n=60, **changes):
        self.model = make_token_model(**changes).to(torch.float64)
        self.tokens = torch.randint(17, (n, 9), generator=torch.Generator().manual_seed(0))
        _, self.cache = self.model.run_with_cache(self.tokens)
        self.held_out = torch.arange(n) % 5 == 4
        self.queries = slice(1, None)  # query 0 has one key, so no rank 2

    def keys(self, layer, head, rank):
        scores = self.cache[f"blocks.{layer}.attn.hook_attn_scores"][:, head, self.queries]
        return scores.argsort(dim=-1, descending=True)[..., rank - 1]

    def at(self, values, keys):
        """values [n, pos, d] at keys [n, query]."""
        return torch.gather(values, 1, keys.unsqueeze(-1).expand(-1, -1, values.shape[-1]))

    def errors(self, state, target, model=None):
        fit, test = ~self.held_out, self.held_out
        x = state[:, self.queries]
        model = (model or LinearRegression()).fit(x[fit].flatten(0, 1), target[fit].flatten(0, 1))
        wanted = target[test].flatten(0, 1).numpy()
        error = ((model.predict(x[test].flatten(0, 1)) - wanted) ** 2).sum()
        return error / (wanted**2).sum(), error / ((wanted - wanted.mean(0)) ** 2).sum()

    def probe(self, **settings):
        (result,) = run_probes(
            self.model,
            self.tokens,
            [RecoveryProbe((1, 2), **settings)],
            batch_size=13,
            progress=False,
        )
        return result


@pytest.fixture(scope="module")
def reference():
    return Reference()


def assert_errors(result, layer, head, rank, expected):
    column = result.ranks.index(rank)
    found = (result.second_moment[layer][head, column], result.fvu[layer][head, column])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_residual_stream_before_a_layer_as_the_target(reference):
    result = reference.probe(target=("resid_pre", 1))
    values = reference.cache["blocks.1.hook_resid_pre"]
    state = reference.cache["blocks.1.hook_resid_mid"]
    for head, rank in ((0, 1), (3, 2)):
        target = reference.at(values, reference.keys(1, head, rank))
        assert_errors(result, 1, head, rank, reference.errors(state, target))


def test_a_table_and_a_function_are_targets(reference):
    table = torch.randn(17, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    by_table = reference.probe(target=table)
    by_function = reference.probe(target=lambda tokens: table[tokens])
    target = reference.at(table[reference.tokens], reference.keys(0, 2, 1))
    state = reference.cache["blocks.0.hook_resid_mid"]
    for result in (by_table, by_function):
        assert_errors(result, 0, 2, 1, reference.errors(state, target))
    assert by_table.record.config["target"].keys() == {"table"}
    assert "<lambda>" in by_function.record.config["target"]["function"]


@pytest.mark.parametrize("vocabulary", [None, (16, 3, 5)])
def test_identity_is_one_hot_with_the_accuracy_of_the_largest_entry(reference, vocabulary):
    result = reference.probe(target="identity", vocabulary=vocabulary)
    ids = torch.tensor(vocabulary or range(17))
    one_hot = (reference.tokens[..., None] == ids).double()
    state = reference.cache["blocks.1.hook_resid_mid"]
    for head, rank in ((1, 1), (2, 2)):
        target = reference.at(one_hot, reference.keys(1, head, rank))
        assert_errors(result, 1, head, rank, reference.errors(state, target))
        x = state[:, reference.queries]
        fitted = LinearRegression().fit(
            x[~reference.held_out].flatten(0, 1), target[~reference.held_out].flatten(0, 1)
        )
        wanted = target[reference.held_out].flatten(0, 1).numpy()
        known = wanted.sum(1) == 1
        predicted = fitted.predict(x[reference.held_out].flatten(0, 1)).argmax(1)
        expected = (predicted == wanted.argmax(1))[known].mean()
        assert float(result.accuracy[1][head, rank - 1]) == pytest.approx(expected)
    assert 0 < float(result.accuracy[0].mean()) < 1


def test_the_state_after_the_mlp_as_the_source(reference):
    result = reference.probe(source="resid_post")
    target = reference.at(reference.cache["hook_embed"], reference.keys(0, 1, 2))
    expected = reference.errors(reference.cache["blocks.0.hook_resid_post"], target)
    assert_errors(result, 0, 1, 2, expected)


def test_each_head_reads_its_own_output(reference):
    result = reference.probe(source="head", controls=("shuffled", "self"))
    assert result.weight[0].shape == (4, 2, 5, 12)
    for head, rank in ((0, 2), (3, 1)):
        z = reference.cache["blocks.1.attn.hook_z"][:, :, head]
        target = reference.at(reference.cache["hook_embed"], reference.keys(1, head, rank))
        assert_errors(result, 1, head, rank, reference.errors(z, target))
        itself = reference.cache["hook_embed"][:, reference.queries]
        expected = reference.errors(z, itself)[1]
        assert float(result.control_fvu[1][1, head, rank - 1]) == pytest.approx(expected)


def test_positions_left_out_are_neither_keys_nor_queries():
    reference = Reference()
    reference.queries = slice(2, None)  # 0 is left out, 1 has a single key then
    result = reference.probe(without=(0,))
    scores = reference.cache["blocks.0.attn.hook_attn_scores"][:, 1, 2:].clone()
    scores[..., 0] = -torch.inf
    target = reference.at(reference.cache["hook_embed"], scores.argmax(-1))
    expected = reference.errors(reference.cache["blocks.0.hook_resid_mid"], target)
    assert_errors(result, 0, 1, 1, expected)
    assert result.n_fit[0] + result.n_eval[0] == 60 * 7
    assert "layer 0: 60 rows left out" in result.notes[0]  # query 1 of each


def test_controls_are_maps_to_other_tokens(reference):
    result = reference.probe(controls=True)
    assert result.controls == ("random", "shuffled", "self")
    state, embedded = reference.cache["blocks.1.hook_resid_mid"], reference.cache["hook_embed"]
    itself = embedded[:, reference.queries]
    for control, errors in zip(result.control_fvu, result.fvu, strict=True):
        assert control.shape == (3, *errors.shape)
    expected = reference.errors(state, itself)
    np.testing.assert_allclose(result.control_second_moment[1][2], expected[0], rtol=1e-6)
    np.testing.assert_allclose(result.control_fvu[1][2], expected[1], rtol=1e-6)
    allowed = torch.ones(60, 9, 9).tril().bool()
    drawn = random_keys(allowed, [9] * 60, 0, range(60))
    expected = reference.errors(state, reference.at(embedded, drawn[:, reference.queries]))
    np.testing.assert_allclose(result.control_fvu[1][0], expected[1], rtol=1e-6)
    keys = reference.keys(1, 2, 1)
    before = torch.cat([drawn[:1, reference.queries], keys[:-1]])  # the first has none before
    expected = reference.errors(state, reference.at(embedded, before))
    assert float(result.control_fvu[1][1, 2, 0]) == pytest.approx(expected[1], rel=1e-6)
    assert "fvu_shuffled" in result.to_frame()


def test_controls_change_nothing_else(reference):
    plain, controlled = reference.probe(), reference.probe(controls=True)
    torch.testing.assert_close(plain.fvu, controlled.fvu, rtol=1e-9, atol=0)
    assert plain.weight[0].shape == controlled.weight[0].shape
    assert plain.controls == ()


def test_random_keys_are_allowed_uniform_and_tied_to_the_sequence():
    allowed = torch.tensor([[False, True, True, False, True], [False] * 5]).expand(4000, -1, -1)
    drawn = random_keys(allowed, [2] * 4000, 7, range(4000))
    assert (drawn[:, 1] == -1).all()
    counts = drawn[:, 0].bincount(minlength=5)
    assert counts[[0, 3]].sum() == 0
    assert (counts[[1, 2, 4]] - 4000 / 3).abs().max() < 5 * (4000 * 2 / 9) ** 0.5
    assert random_keys(allowed[:9], [2] * 9, 7, range(100, 109)).equal(drawn[100:109])
    state = torch.random.get_rng_state()
    random_keys(allowed[:2], [2] * 2, 7, range(2))
    assert state.equal(torch.random.get_rng_state())


SETTINGS = [
    {},
    {"controls": True, "source": "head"},
    {"target": "identity", "controls": ("shuffled",)},
    {"sketch": 5, "ridge": "gcv", "blocks": 3},
    {"buffer_rows": 10, "controls": True},
]


@pytest.mark.parametrize("settings", some_of(SETTINGS, SETTINGS[0], SETTINGS[3]))
def test_the_batch_size_changes_no_setting(settings):
    model = make_token_model()
    x = torch.randint(17, (24, 9), generator=torch.Generator().manual_seed(0))
    results = [
        run_probes(model, x, [RecoveryProbe((1, 2), **settings)], batch_size=size, progress=False)[
            0
        ]
        for size in (1, 7, 24)
    ]
    for other in results[1:]:
        torch.testing.assert_close(
            torch.tensor(other.to_frame().to_numpy(dtype=float)),
            torch.tensor(results[0].to_frame().to_numpy(dtype=float)),
            rtol=1e-6,
            atol=1e-9,
            equal_nan=True,
        )


def test_sequences_of_different_lengths_give_what_each_gives_alone():
    """Padding takes part in nothing, not even in random keys."""
    model = make_token_model().to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    x = [torch.randint(17, (3 + i % 6,), generator=generator) for i in range(40)]
    settings = {"controls": True, "blocks": 2}
    padded, alone = (
        run_probes(model, x, [RecoveryProbe((1,), **settings)], batch_size=size, progress=False)[0]
        for size in (40, 1)
    )
    for name in ("fvu", "fvu_high", "control_fvu"):
        torch.testing.assert_close(getattr(padded, name), getattr(alone, name), rtol=1e-8, atol=0)


def test_a_ridge_is_scikit_learns(reference):
    result = reference.probe(ridge=2.5)
    target = reference.at(reference.cache["hook_embed"], reference.keys(1, 0, 1))
    state = reference.cache["blocks.1.hook_resid_mid"]
    assert_errors(result, 1, 0, 1, reference.errors(state, target, Ridge(2.5)))
    chosen = reference.probe(ridge="gcv")
    penalty = float(chosen.ridge[1][0, 0])
    assert_errors(chosen, 1, 0, 1, reference.errors(state, target, Ridge(penalty)))


def test_intervals_leave_out_one_block_at_a_time(reference):
    result = reference.probe(blocks=4)
    state = reference.cache["blocks.1.hook_resid_mid"][:, reference.queries]
    target = reference.at(reference.cache["hook_embed"], reference.keys(1, 0, 2))
    fit = LinearRegression().fit(
        state[~reference.held_out].flatten(0, 1), target[~reference.held_out].flatten(0, 1)
    )
    x, y = state[reference.held_out], target[reference.held_out]
    estimates = []
    for block in range(4):
        kept = torch.arange(len(x)) % 4 != block
        wanted = y[kept].flatten(0, 1).numpy()
        error = ((fit.predict(x[kept].flatten(0, 1)) - wanted) ** 2).sum()
        estimates.append(error / ((wanted - wanted.mean(0)) ** 2).sum())
    half = student.ppf(0.975, 3) * np.sqrt(3 / 4 * ((estimates - np.mean(estimates)) ** 2).sum())
    middle = float(result.fvu[1][0, 1])
    assert float(result.fvu_low[1][0, 1]) == pytest.approx(middle - half, rel=1e-6)
    assert float(result.fvu_high[1][0, 1]) == pytest.approx(middle + half, rel=1e-6)


def test_one_block_gives_no_interval(reference):
    result = reference.probe(blocks=1)
    assert result.fvu_low == ()
    assert "fvu_low" not in result.to_frame()
    assert not any("interval" in note for note in result.notes)  # as asked


def test_the_standard_error_of_a_sketch_is_that_of_its_deviations(reference):
    exact = torch.stack(reference.probe().fvu)
    deviations, promised = [], []
    for seed in range(12):
        result = reference.probe(sketch=6, seed=seed)
        deviations.append(torch.stack(result.fvu) - exact)
        promised.append(torch.stack(result.fvu_sketch_error))
    deviation = torch.stack(deviations).square().mean().sqrt()
    expected = torch.stack(promised).square().mean().sqrt()
    assert 0.6 < float(deviation / expected) < 1.6
    assert any("6 random directions of 12" in note for note in result.notes)
    matrix = sketch_matrix(12, 6, 3, torch.device("cpu"))
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(6, dtype=torch.float64))


def test_a_sketch_is_the_error_of_projected_targets(reference):
    result = reference.probe(sketch=4, seed=3)
    matrix = sketch_matrix(12, 4, 3, torch.device("cpu"))
    target = reference.at(reference.cache["hook_embed"] @ matrix, reference.keys(0, 1, 1))
    expected = reference.errors(reference.cache["blocks.0.hook_resid_mid"], target)
    assert_errors(result, 0, 1, 1, expected)
    assert result.weight[0].shape == (4, 2, 12, 4)


def test_maps_refuse_the_states_of_another_model(reference):
    result = reference.probe()
    state = reference.cache["blocks.1.hook_resid_mid"][:3, 4]
    found = result.apply(state, 1, 3, 2, model=reference.model)
    torch.testing.assert_close(found, state @ result.weight[1][3, 1] + result.bias[1][3, 1])
    other = Reference(2, init_weights=True, seed=9).model
    with pytest.raises(InfoFlowError, match="other weights"):
        result.apply(state, 1, 3, 2, model=other)
    folded = Reference(2, normalization_type="LNPre").model
    with pytest.raises(InfoFlowError, match="folding changes the basis"):
        result.apply(state, 1, 3, 2, model=folded)
    for wrong, match in (
        ((state, 1, 3, 3), "weight has no rank 3"),
        ((state, 2, 0, 1), "weight has no layer 2"),
        ((state[:, :5], 1, 3, 2), "5 features: expected 12"),
    ):
        with pytest.raises(InfoFlowError, match=match):
            result.apply(*wrong, model=reference.model)


def test_maps_need_not_be_kept(reference):
    result, kept = reference.probe(maps=False), reference.probe()
    assert (result.weight, result.bias) == ((), ())
    torch.testing.assert_close(result.fvu, kept.fvu)
    with pytest.raises(InfoFlowError, match="not kept"):
        result.apply(torch.zeros(12), 0, 0, 1, model=reference.model)


def test_results_with_everything_are_saved_and_loaded(reference, tmp_path):
    result = reference.probe(target="identity", controls=True, ridge="gcv")
    result.save(tmp_path / "recovery")
    loaded = RecoveryResult.load(tmp_path / "recovery")
    assert loaded.to_frame().equals(result.to_frame())
    assert loaded.controls == result.controls


def test_what_was_taken_in_does_not_change_with_the_users_tensor(model, many_inputs):
    """Models over vectors show the user's own tensor, which may be filled again."""
    expected = run_probes(model, many_inputs, [RecoveryProbe()], progress=False)[0]
    buffer = torch.empty(12, N_TOKENS, D_TOKEN)
    with attach(model, RecoveryProbe()) as probes, torch.no_grad():
        for batch in many_inputs.split(12):
            model(buffer.copy_(batch))
        buffer.zero_()
    torch.testing.assert_close(probes[0].result().fvu, expected.fvu, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_measured(dtype, token_inputs):
    (result,) = run_probes(
        make_token_model().to(dtype), token_inputs, [RecoveryProbe(sketch=4)], progress=False
    )
    assert all(fvu.isfinite().all() and fvu.dtype == torch.float64 for fvu in result.fvu)


def test_what_a_model_cannot_give_is_refused(model, inputs, token_model, token_inputs):
    with pytest.raises(InfoFlowError, match="reads vectors"):
        run_probes(model, inputs, [RecoveryProbe(target="identity")], progress=False)
    with pytest.raises(InfoFlowError, match=r"no hook point 'blocks\.7\.hook_resid_pre'"):
        run_probes(model, inputs, [RecoveryProbe(target=("resid_pre", 7))], progress=False)
    with pytest.raises(InfoFlowError, match="sketch is 12 for targets of 12 dimensions"):
        run_probes(token_model, token_inputs, [RecoveryProbe(sketch=12)], progress=False)
    with pytest.raises(InfoFlowError, match="expected a row for each token id"):
        run_probes(
            token_model, token_inputs, [RecoveryProbe(target=torch.ones(4, 2))], progress=False
        )
    with pytest.raises(InfoFlowError, match=r"expected a tensor \[19, 9, d\]"):
        run_probes(token_model, token_inputs, [RecoveryProbe(target=lambda x: x)], progress=False)
    probe = RecoveryProbe(target="identity")
    with pytest.raises(InfoFlowError, match="hooks alone do not see the tokens"):
        token_model.run_with_hooks(token_inputs, fwd_hooks=probe.fwd_hooks(token_model))
    large = make_token_model(d_vocab=5000)
    with pytest.raises(InfoFlowError, match="the model has 5000 tokens"):
        run_probes(large, token_inputs, [RecoveryProbe(target="identity")], progress=False)


def test_every_seed_draws_keys():
    """Seeds from 2**31 on ended in a ValueError of the generator."""
    allowed = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    large, small = (random_keys(allowed, (4, 3), seed, (0, 1)) for seed in (2**63 - 1, 2**31))
    assert (large <= torch.arange(4)).all()
    assert (small <= torch.arange(4)).all()

"""A pass is seen once: padding moved away, checked, ranked, however many probes ask."""

import pytest
import torch
from transformers import AutoTokenizer

from infoflow_lens import InfoFlowError, PositionsProbe, RecoveryProbe, attach, run_probes
from infoflow_lens.hooks import AttendedProbe, Needs, Pass, run
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.semantics import hook_semantics
from infoflow_lens.hooks.passes import view
from infoflow_lens.models.host import build_token_model
from tests.conftest import make_token_model
from tests.hooks.model.test_inputs import padded
from tests.reference import ranking, zoo
from tests.versions import needs_hooked_transformer


@pytest.fixture
def counted(monkeypatch):
    calls = []
    rank = view.rank_keys
    monkeypatch.setattr(
        view,
        "rank_keys",
        lambda scores, ranks, *more, **by: (
            calls.append(max(ranks)) or rank(scores, ranks, *more, **by)
        ),
    )
    return calls


def rows(tokens):
    return [row[: 9 - i % 4] for i, row in enumerate(tokens)]


@pytest.mark.parametrize("pad", [False, True])
def test_keys_are_ranked_once_for_all_probes(token_model, token_inputs, counted, pad):
    inputs = rows(token_inputs) if pad else token_inputs
    probes = [PositionsProbe((1, 3)), RecoveryProbe((2,)), PositionsProbe((1,))]
    with attach(token_model, *probes), attach(token_model, PositionsProbe((2,))):
        ids, mask = padded(inputs, "left")
        token_model(ids, attention_mask=mask)
    assert counted == [3, 3]  # once a layer, as deep as any probe asks


def test_keys_that_are_left_out_are_ranked_once_each(token_model, token_inputs, counted):
    probes = [PositionsProbe((1, 2), without=(0,)), RecoveryProbe((1,), without=(0,))]
    run_probes(token_model, token_inputs, [*probes, PositionsProbe((1,))], progress=False)
    assert sorted(counted) == [1, 1, 2, 2]


def test_padding_is_moved_once(token_model, token_inputs, monkeypatch):
    calls = []
    along = view._along
    monkeypatch.setattr(view, "_along", lambda *args: calls.append(args) or along(*args))
    ids, mask = padded(rows(token_inputs), "left")
    count = []
    for probes in ([RecoveryProbe()], [RecoveryProbe(), RecoveryProbe((2,)), PositionsProbe()]):
        calls.clear()
        with attach(token_model, *probes):
            token_model(ids, attention_mask=mask)
        count.append(len(calls))
    assert count[0] == count[1]


def test_a_view_answers_as_the_cache_does(token_model, token_inputs):
    names = Needs.of(
        token_model, scores=True, pattern=True, tokens=True,
        states=("post_attention", "resid_post", "resid_pre", "head"),
    ).points  # fmt: skip
    _, cache = token_model.run_with_cache(token_inputs)
    seen = Pass(token_model, {name: cache[name] for name in names})
    assert (len(seen), seen.n_layers, seen.lengths) == (19, 2, None)
    for layer in range(2):
        block = f"blocks.{layer}."
        scores = cache[block + "attn.hook_attn_scores"]
        if (
            hook_semantics(token_model).scores[layer] == "pattern"
        ):  # in their place, on a native bridge
            scores = scores.log()
        assert seen.scores(layer).equal(scores)
        assert seen.pattern(layer).equal(cache[block + "attn.hook_pattern"])
        assert seen.state(layer).equal(cache[block + "hook_resid_mid"])
        assert seen.state(layer, "resid_post").equal(cache[block + "hook_resid_post"])
        assert seen.state(layer, "resid_pre").equal(cache[block + "hook_resid_pre"])
        assert seen.state(layer, "head").equal(cache[block + "attn.hook_z"])
        found = seen.ranked(layer, (2, 1))
        for query in (0, 3, 8):
            row = scores[5, 1, query].tolist()
            expected = [position for position, _, _ in ranking.rank(row, (2, 1))]
            assert found.positions[5, 1, query].tolist() == expected
    assert seen.embedding().equal(cache["hook_embed"])
    with pytest.raises(InfoFlowError, match="was not collected"):
        seen.activation("blocks.0.hook_mlp_out")


def test_what_scores_are_never_depends_on_their_values(token_inputs):
    """Scores that are not negative equal their own ReLU, but are scores all the same (P8)."""
    token_model = build_token_model(
        n_layers=2, n_heads=4, d_head=5, d_model=12, n_tokens=9, d_vocab=17, d_output=17,
        attention="relu", seed=2,
    )  # fmt: skip
    hooks = [
        (f"blocks.{layer}.attn.hook_attn_scores", lambda scores, hook: scores.abs().clamp(max=9))
        for layer in range(2)
    ]
    with token_model.hooks(fwd_hooks=hooks):
        plain, spread = run_probes(
            token_model,
            token_inputs,
            [PositionsProbe((1, 2)), PositionsProbe((1, 2), spread=True)],
            progress=False,
        )
        (alone,) = run_probes(
            token_model, token_inputs, [PositionsProbe((1, 2), spread=True)], progress=False
        )
    for layer in range(2):
        for other in (spread, alone):
            assert plain.positions[layer].equal(other.positions[layer])
            assert plain.margins[layer].nan_to_num().equal(other.margins[layer].nan_to_num())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [PositionsProbe, RecoveryProbe, AttendedProbe])
def test_hooks_alone_refuse_padding(token_model, token_inputs, make, side):
    """They do not see the mask, so padding would become rows (P6)."""
    ids, mask = padded(rows(token_inputs), side)
    probe = make()
    with pytest.raises(InfoFlowError, match=r"use attach\(\) or run_probes\(\)"):
        token_model.run_with_hooks(ids, attention_mask=mask, fwd_hooks=probe.fwd_hooks(token_model))
    assert probe.n_sequences == 0
    token_model.run_with_hooks(token_inputs, fwd_hooks=probe.fwd_hooks(token_model))
    assert probe.n_sequences == 19


@needs_hooked_transformer  # a bridge makes no mask for ids
def test_a_side_of_padding_that_the_call_names_is_heeded(tmp_path):
    """`padding_side="left"` makes a model mask leading pad tokens without a mask (P6)."""
    model = make_token_model(d_vocab=zoo.N_VOCAB, n_ctx=9)
    zoo.tokenizer().save_pretrained(tmp_path)  # one in memory has no path to be made again from
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model.set_tokenizer(tokenizer, default_padding_side="right")
    ids, mask = padded([row + 4 for row in rows(torch.zeros(5, 9, dtype=torch.long))], "left")
    with attach(model, PositionsProbe()) as probes:
        with pytest.raises(InfoFlowError, match="which this model masks by itself"):
            model(ids, padding_side="left")
        model(ids, attention_mask=mask, padding_side="left")
    assert probes[0].result().lengths.tolist() == mask.sum(dim=1).tolist()


@pytest.mark.parametrize(
    "mask",
    [
        torch.full((2, 9), 0.5),
        torch.full((2, 9), 7),
        torch.full((2, 9), -3),
        torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9]),
        torch.zeros(2, 9),
    ],
    ids=["floats", "sevens", "negative", "a hole", "nothing real"],
)
def test_masks_of_other_values_and_with_holes_are_refused(token_model, token_inputs, mask):
    x = token_inputs[:2]
    with pytest.raises(InfoFlowError, match=r"expected a tensor \[batch, pos\] of 1|one stretch"):
        run_probes(token_model, x, [PositionsProbe()], attention_mask=mask, progress=False)
    with (
        attach(token_model, PositionsProbe()),
        pytest.raises(InfoFlowError, match=r"expected a tensor \[batch, pos\] of 1|one stretch"),
    ):
        token_model(x, attention_mask=mask)


def test_numbers_of_numpy_are_read_and_booleans_are_not(token_model, token_inputs):
    import numpy as np

    from infoflow_lens import JacobianInfluence

    assert PositionsProbe(np.arange(1, 3)).ranks == (1, 2)
    assert JacobianInfluence(layers=np.arange(2), positions=torch.tensor([-1])).layers == (0, 1)
    for make in (
        lambda: PositionsProbe((True,)),
        lambda: JacobianInfluence(chunk_size=2.5),
        lambda: JacobianInfluence(layers=(True,)),
        lambda: RecoveryProbe(seed=True),
        lambda: run_probes(token_model, token_inputs, [PositionsProbe()], batch_size=True),
    ):
        with pytest.raises(InfoFlowError, match="expected"):
            make()
    with pytest.raises(InfoFlowError, match="expected real vector tokens"):
        run_probes(token_model, token_inputs.to(torch.complex64), [PositionsProbe()])


def test_reductions_leave_padding_out(token_model, token_inputs):
    """Sums and means of padded sequences are those of each sequence alone."""
    sequences = rows(token_inputs)
    ids, mask = padded(sequences, "right")
    with torch.no_grad():
        together = run(
            token_model,
            Batch(ids, mask.sum(dim=1)),
            Needs.of(token_model, pattern=True, states=("resid_post",)),
        )
        pattern, state = together.pattern(1), together.state(1, "resid_post")
        for index, row in enumerate(sequences):
            alone = run(token_model, row[None], ("blocks.1.attn.hook_pattern",)).pattern(1)[0]
            sums = together.sum_over_queries(pattern)[index, :, : len(row)]
            torch.testing.assert_close(sums, alone.sum(dim=1))
            mean = together.mean_over_queries(pattern)[index, :, : len(row)]
            torch.testing.assert_close(mean, alone.mean(dim=1))
            own = state[index, : len(row)]
            torch.testing.assert_close(together.sum_over_positions(state)[index], own.sum(dim=0))
            torch.testing.assert_close(together.mean_over_positions(state)[index], own.mean(dim=0))

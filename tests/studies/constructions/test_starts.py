"""Training may start from weights set by hand."""

import pytest
import torch

from infoflow_lens import InfoFlowError
from infoflow_lens.models.host import build_token_model
from infoflow_lens.studies.constructions import (
    build_construction,
    perturbed_construction,
    with_scores_of,
)

SIZES = {"n_questions": 5, "n_answers": 4, "n_pairs": 3}


def test_noise_has_the_asked_deviation_and_its_seed():
    exact, _ = build_construction("in_context_qa", **SIZES)
    state = torch.get_rng_state()
    model, _ = perturbed_construction("in_context_qa", 0.05, seed=1, **SIZES)
    same, _ = perturbed_construction("in_context_qa", 0.05, seed=1, **SIZES)
    other, _ = perturbed_construction("in_context_qa", 0.05, seed=2, **SIZES)
    assert torch.get_rng_state().equal(state)
    for name, value in exact.named_parameters():
        noise = model.state_dict()[name] - value.detach()
        assert same.state_dict()[name].equal(model.state_dict()[name])
        if name.split(".")[-1] in ("W_Q", "W_K", "W_V", "W_O", "W_U"):
            assert float(noise.std()) == pytest.approx(0.05, rel=0.2)
            assert not other.state_dict()[name].equal(model.state_dict()[name])
        else:
            assert not noise.any(), name
    assert not model.embed.W_E.requires_grad
    assert not model.pos_embed.W_pos.requires_grad


def test_without_noise_it_is_the_construction():
    model, task = perturbed_construction("in_context_qa", 0, **SIZES)
    x, y = task.sample(50, seed=0)
    assert model(x)[:, -1].argmax(dim=1).equal(y)


def start(task, **changes):
    d = task.d_vocab + task.n_tokens
    settings = {
        "n_layers": 2,
        "n_heads": 1,
        "d_head": d,
        "d_model": d,
        "n_tokens": task.n_tokens,
        "d_vocab": task.d_vocab,
        "d_output": task.n_labels,
        "init": "chen_zou",
    }
    return build_token_model(**(settings | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_heads": (2, 1), "d_model": 27, "d_head": 27},
        {"init": "random", "one_hot": True, "d_head": 25},
    ],
)
def test_the_first_layer_scores_as_constructed_and_the_rest_stays(changes):
    construction, task = build_construction("in_context_qa", **SIZES)
    model = start(task, **changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    begun = with_scores_of(model, construction)
    x, _ = task.sample(20, seed=0)
    name = "blocks.0.attn.hook_attn_scores"
    scores = [m.run_with_cache(x)[1][name] for m in (begun, construction)]
    torch.testing.assert_close(scores[0], scores[1].expand_as(scores[0]))
    for key, value in begun.state_dict().items():
        if not key.startswith("blocks.0.attn.W_"):
            assert value.equal(before[key])
    assert begun.blocks[0].attn.W_V.equal(before["blocks.0.attn.W_V"])
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_what_does_not_fit_is_named():
    construction, task = build_construction("in_context_qa", **SIZES)
    other, _ = build_construction("in_context_qa", n_questions=6, n_answers=4, n_pairs=3)
    model = start(task)
    with pytest.raises(InfoFlowError, match="d_vocab 10, the construction 11"):
        with_scores_of(model, other)
    with pytest.raises(InfoFlowError, match="attention 'softmax', the construction 'relu'"):
        with_scores_of(start(task, attention="softmax"), construction)
    with pytest.raises(InfoFlowError, match="layer 2 is asked for: expected layers 0 to 1"):
        with_scores_of(model, construction, layers=(0, 2))
    small = {"init": "random", "d_model": 9, "d_head": 30}
    with pytest.raises(InfoFlowError, match="d_model is 9, the construction's 21"):
        with_scores_of(start(task, **small), construction)
    with pytest.raises(InfoFlowError, match="d_head is 3"):
        with_scores_of(start(task, init="random", one_hot=True, d_head=3), construction)
    vectors, _ = build_construction("d_retrieval")
    with pytest.raises(InfoFlowError, match="expected a construction over token ids"):
        with_scores_of(model, vectors)
    with pytest.raises(InfoFlowError, match="expected a construction over token ids"):
        perturbed_construction("d_retrieval", 0.1)
    for scale in (-1, float("nan")):
        with pytest.raises(InfoFlowError, match="scale is"):
            perturbed_construction("in_context_qa", scale)

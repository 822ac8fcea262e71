"""Models of several seeds as one batched pass, against each model alone."""

import itertools
from dataclasses import replace

import pytest
import torch

from infoflow_lens import Architecture, InfoFlowError, build_model
from infoflow_lens.studies.stacked import check_stackable, compute_readouts

PLAIN = Architecture(
    n_heads=(2, 3), d_head=(3, 4), d_model=8, d_token=3, n_tokens=5, d_mlp=8, d_encoder=6
)
ARCHITECTURES = {
    "two layers": PLAIN,
    "attention alone": replace(PLAIN, d_mlp=0),
    "one layer": replace(PLAIN, n_heads=(2,), d_head=(3,), attn_scale=2.0),
    "layer norm": replace(PLAIN, normalization="LN"),
    "positions": replace(PLAIN, positional_embedding="learned"),
    "CLS is a key": replace(PLAIN, cls_is_key=True),
    "hard maximum": replace(PLAIN, attention="hardmax"),
    "ReLU attention": replace(PLAIN, attention="relu"),
}


def models(architecture, n=3):
    """With biases, gains and positions that are not those of the beginning."""
    made = [build_model(architecture, seed=seed).to(torch.float64) for seed in range(n)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in itertools.chain.from_iterable(model.parameters() for model in made):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise / 3)
    return made


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_each_model_alone(name):
    found = models(ARCHITECTURES[name])
    weights = {
        key: torch.stack([model.get_parameter(key).detach() for model in found]).requires_grad_()
        for key, _ in found[0].named_parameters()
    }
    x = torch.randn(3, 6, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = compute_readouts(found[0], weights, x)
    together.square().sum().backward()
    for seed, (model, own) in enumerate(zip(found, x, strict=True)):
        output = model(own)
        torch.testing.assert_close(together[seed], output)
        output.square().sum().backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:  # of a hard maximum, queries and keys have none
                torch.testing.assert_close(weights[key].grad[seed], parameter.grad)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(PLAIN, d_model=9), "architecture"),
        (replace(PLAIN, attention="hardmax"), "architecture"),
        (torch.float32, "precision"),
    ],
)
def test_models_of_two_kinds_are_refused_by_what_differs(other, what):
    found = models(PLAIN, 2)
    if isinstance(other, Architecture):
        found[1] = models(other, 1)[0]
    else:
        found[1].to(other)
    with pytest.raises(InfoFlowError, match=rf"models\[1\] has another {what}"):
        check_stackable(found)


def test_what_would_not_be_run_or_trained_is_refused_by_name():
    found = models(PLAIN, 2)
    check_stackable(found)
    found[1].add_hook("hook_embed", lambda activation, hook: None)
    with pytest.raises(InfoFlowError, match=r"models\[1\] has hooks on hook_embed"):
        check_stackable(found)
    found[1].reset_hooks()
    found[1].unembed.b_U.requires_grad_(False)
    with pytest.raises(InfoFlowError, match=r"models\[1\] has fixed parameters \(unembed\.b_U\)"):
        check_stackable(found)
    with pytest.raises(InfoFlowError, match=r"models\[1\] is a Linear"):
        check_stackable([found[0], torch.nn.Linear(2, 2)])

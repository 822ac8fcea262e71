"""Derivatives of a pass by its patterns, in random directions of the output.

For a small change d of the logits of a row the divergence is d^T F d / 2, with the Fisher
information F = diag(p) - p p^T; the squared change of an output is d^T d. A random direction g
whose covariance is F (or the identity) gives this as the mean of (g . d)^2. The directions of
different rows are independent, so one backward pass serves all rows.

Sampling y from the model and taking d log p(y) is one such direction, but where the model is sure
nearly every sample tells nothing. Here signs are drawn: sqrt(F) times a vector of them. And where
the model is sure, F sees little of a change that overturns the choice: so p may be flattened.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.patterns import SeenKeys, edits_of_patterns
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch
from infoflow_lens.hooks.model.points import hook_name


@contextmanager
def differentiable(
    model: nn.Module,
    batch: Batch,
    layers: Sequence[int],
    look: Callable[[int, SeenKeys, Tensor], None] | None = None,
    look_at_output: Callable[[int, Tensor], None] | None = None,
    caught: dict[str, Tensor] | None = None,
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The output of a pass, and for each layer zeros added to its pattern, to differentiate by.

    Args:
        model: in evaluation mode.
        batch: some sequences.
        layers: whose patterns.
        look: called with each layer, the keys that it sees, and its pattern.
        look_at_output: called with each layer and its z; then zeros added to z stand behind those
            of the patterns.
        caught: by hook point what is to be filled with its activations.
    """
    leaves: dict[str, Tensor] = {}

    def add(name: str, activation: Tensor) -> Tensor:
        leaves[name] = torch.zeros_like(activation, requires_grad=True)
        return activation + leaves[name]

    def add_to_pattern(layer: int, seeing: SeenKeys, pattern: Tensor) -> Tensor:
        if look is not None:
            look(layer, seeing, pattern.detach())
        return add(f"pattern {layer}", pattern)

    def add_to_output(layer: int, z: Tensor, hook: Any) -> Tensor:
        assert look_at_output is not None
        look_at_output(layer, z.detach())
        return add(f"z {layer}", z)

    hooks = edits_of_patterns(model, layers, add_to_pattern)
    names = [f"pattern {layer}" for layer in layers]
    if look_at_output is not None:
        points = [hook_name(model, f"blocks.{layer}.attn.hook_z") for layer in layers]
        hooks += [(p, partial(add_to_output, i)) for p, i in zip(points, layers, strict=True)]
        names += [f"z {layer}" for layer in layers]
    with without_backward_hooks(model), torch.inference_mode(False), torch.enable_grad():
        tokens = batch.tokens.clone()  # those made in inference mode take no part in a graph
        made = call(
            model, replace(batch, tokens=tokens), caught or (), edit=hooks, output=True,
            keep_graph=True,
        )  # fmt: skip
        if caught:
            caught |= {point: made.activations[point].detach() for point in caught}
        yield made.output, [leaves[name] for name in names]


def gradients(
    outputs: Tensor, leaves: Sequence[Tensor], direction: Tensor | None = None
) -> Sequence[Tensor | None]:
    """Differentiate the outputs, in a direction, by each leaf; None where there is no gradient."""
    if not outputs.requires_grad:
        return [None for _ in leaves]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, leaves, direction, retain_graph=True, allow_unused=True
    )
    return found


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """The model without the user's backward hooks, which would see, or change, our gradients."""
    modules = list(model.modules())
    saved = [(module._backward_hooks, module._backward_pre_hooks) for module in modules]
    try:
        for module in modules:
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, (hooks, pre_hooks) in zip(modules, saved, strict=True):
            module._backward_hooks, module._backward_pre_hooks = hooks, pre_hooks


def directions(
    rows: Float[Tensor, "batch row feature"],
    metric: Damage,
    batch: Batch,
    draws: int,
    seeds: Sequence[int],
    temperature: float = 1.0,
) -> Iterator[Float[Tensor, "batch row feature"]]:
    """Random directions of the output whose covariance is that of the metric's second-order form.

    Args:
        rows: of the output, where it may count.
        metric: what is lost.
        batch: the sequences.
        draws: how many directions.
        seeds: one for each sequence.
        temperature: by which the distribution is flattened.
    """
    counted = metric.mark_rows(batch)
    p = None if metric.name == "nmse" else (rows / temperature).softmax(dim=-1)
    root = None if p is None else p.sqrt()
    signs = [_signs(s, draws, rows.shape[2], real) for s, real in zip(seeds, counted, strict=True)]
    by_feature, by_row = (torch.stack(part, dim=1).to(rows) for part in zip(*signs, strict=True))
    direction = torch.empty_like(rows)
    for draw in range(draws):
        torch.mul(by_row[draw, :, :, None], by_feature[draw, :, None], out=direction)
        if p is not None and root is not None:
            direction *= root
            # sqrt(p) s - p (sqrt(p) . s) for signs s has the covariance diag(p) - p p^T, which is F
            direction.addcmul_(p, direction.sum(dim=-1, keepdim=True), value=-1)
        # one buffer for all draws, as that of a large vocabulary is large: use it before the next
        yield direction


def _signs(seed: int, draws: int, n_features: int, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Signs for the features, and for the rows of one sequence, 0 for those that do not count.

    A sign for each feature times one for each row is enough for rows to be uncorrelated.
    """
    generator = torch.Generator().manual_seed(derive_seed("mechanisms", seed))
    features = torch.randint(2, (draws, n_features), generator=generator) * 2 - 1
    rows = torch.zeros(draws, len(counted), dtype=torch.int64)
    n_counted = int(counted.sum())
    rows[:, counted] = torch.randint(2, (draws, n_counted), generator=generator) * 2 - 1
    return features, rows

"""What every head and ideal costs, to second order, from one pass and a few backward passes.

The directions are signs, one for each row of the output, so that rows are independent. What an edit
of the pattern, or of z, of a query changes is squared *query by query* and then added up: between
queries the products are noise in a few draws. Where a sequence has one row alone, as an embedding,
all queries enter it, so they are added up before the square. An estimate may miss by far, where a
replaced pattern moves the model to where no derivative looks; so what decides a label is measured.

For a small change d of the logits of a row the divergence is d^T F d / 2, with the Fisher
information F = diag(p) - p p^T; the squared change of an output is d^T d. A random direction g
whose covariance is F (or the identity) gives this as the mean of (g . d)^2. The directions of
different rows are independent, so one backward pass serves all rows.

Sampling y from the model and taking d log p(y) is one such direction, but where the model is sure
nearly every sample tells nothing. Here signs are drawn: sqrt(F) times a vector of them. And where
the model is sure, F sees little of a change that overturns the choice: so p may be flattened.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.modules import derive_seed
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.edits import mark_real_queries, split_heads
from infoflow_lens.hooks.interventions.ideals import LayerMeans, make_ideal
from infoflow_lens.hooks.interventions.kept import KeptNumbers
from infoflow_lens.hooks.interventions.patterns import MeanPatterns, SeenKeys, edits_of_patterns
from infoflow_lens.hooks.model.call import call, without_backward_hooks
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import hook_name
from infoflow_lens.hooks.passes.view import Needs, Pass


@contextmanager
def run_with_leaves(
    model: nn.Module,
    batch: Batch,
    layers: Sequence[int],
    look: Callable[[int, SeenKeys, Tensor], None] | None = None,
    look_at_output: Callable[[int, Tensor], None] | None = None,
    caught: dict[str, Tensor] | None = None,
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Run a pass, and yield its output and, for each layer, zeros that were added to its pattern.

    Derivatives of the output by these zeros, which are leaves of the graph, are those by the
    patterns.

    Args:
        model: in evaluation mode.
        batch: some sequences.
        layers: whose patterns.
        look: called with each layer, the keys that it sees, and its pattern.
        look_at_output: called with each layer and its z; then zeros added to z stand behind those
            of the patterns.
        caught: its keys are hook points; the pass puts their activations in.
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


def differentiate(
    outputs: Tensor, leaves: Sequence[Tensor], direction: Tensor | None = None
) -> Sequence[Tensor | None]:
    """Differentiate the outputs, in a direction, by each leaf; None where there is no gradient."""
    if not outputs.requires_grad:
        return [None for _ in leaves]
    return torch.autograd.grad(outputs, leaves, direction, retain_graph=True, allow_unused=True)


def draw_directions(
    rows: Float[Tensor, "batch row feature"],
    metric: Damage,
    batch: Batch,
    draws: int,
    seeds: Sequence[int],
    temperature: float = 1.0,
) -> Iterator[Float[Tensor, "batch row feature"]]:
    """Draw directions of the output whose covariance is that of the metric's second-order form.

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
    signs = [
        _draw_signs(s, draws, rows.shape[2], real) for s, real in zip(seeds, counted, strict=True)
    ]
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


def _draw_signs(seed: int, draws: int, n_features: int, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Draw signs for the features and for the rows of one sequence, 0 where these do not count.

    A sign for each feature times one for each row is enough for rows to be uncorrelated.
    """
    generator = torch.Generator().manual_seed(derive_seed("mechanisms", seed))
    features = torch.randint(2, (draws, n_features), generator=generator) * 2 - 1
    rows = torch.zeros(draws, len(counted), dtype=torch.int64)
    n_counted = int(counted.sum())
    rows[:, counted] = torch.randint(2, (draws, n_counted), generator=generator) * 2 - 1
    return features, rows


DRAWS = 4
_NOTHING = Needs(())

Begin = Callable[[Batch, int, Callable[[Needs], Pass]], None]


class Estimates(NamedTuple):
    """Estimated losses.

    Attributes:
        lost: for every layer float64 [sequence, head, ideal], summed over the rows of a sequence; 0
            where the output does not depend on the head.
        forwards: passes over all sequences; a backward pass counts as one.
    """

    lost: tuple[Float[Tensor, "sequence _head ideal"], ...]
    forwards: float


def estimate_ideals(
    model: nn.Module,
    batches: Batches,
    damage: Damage,
    means: MeanPatterns,
    ideals: Sequence[str],
    *,
    leaves_out: bool,
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int = 8,
    kept: KeptNumbers | None = None,
    begin: Begin | None = None,
) -> Estimates:
    """Estimate what each sequence loses by each ideal of each head.

    Args:
        model: in evaluation mode.
        batches: the sequences.
        damage: what is lost; it sees the outputs.
        means: mean patterns and outputs.
        ideals: their names.
        leaves_out: whether the sequences are among those of the means.
        draws: how many random directions, each of which takes a backward pass.
        seed: of which each sequence derives its own, for its directions.
        batch_size: sequences in a pass.
        kept: what a run that was stopped has reached.
        begin: called with each batch, its first index, and a function that estimates and gives the
            pass, with what it is told to show.
    """
    kept = kept or KeptNumbers({}, None, None)
    layers = [LayerMeans.select(means, i, leaves_out) for i in range(len(means.patterns))]
    counts, n = [len(pattern) for pattern in means.patterns], int(batches.n_sequences or 0)
    fresh = torch.zeros(n, sum(counts), len(ideals), dtype=torch.float64)
    lost, done = kept.take_up_estimates(fresh, damage)
    for batch in batches.batches(batch_size, skip=done):
        stop = done + len(batch)
        seeds = [derive_seed("labels", seed, i) for i in range(done, stop)]
        lost = lost.clone()  # what was kept does not change

        def estimate(
            needs: Needs, batch: Batch = batch, seeds: Any = seeds, rows: Tensor = lost[done:stop]
        ) -> Pass:
            found = estimate_batch(model, batch, damage, layers, ideals, draws, seeds, needs=needs)
            rows.copy_(torch.cat(found.lost, dim=1).nan_to_num())
            return found.plain

        if begin is None:
            estimate(_NOTHING)
        else:
            begin(batch, done, estimate)
        done = stop
        kept.keep(estimates=lost, n_estimated=done, seen=damage.state())
    return Estimates(lost.split(counts, dim=1), 1.0 + draws)


class BatchEstimate(NamedTuple):
    """Estimates of some sequences.

    Attributes:
        lost: as of :class:`Estimates`.
        plain: the pass, with what was needed of it.
    """

    lost: list[Float[Tensor, "sequence head ideal"]]
    plain: Pass


def estimate_batch(
    model: nn.Module,
    batch: Batch,
    damage: Damage,
    layers: Sequence[LayerMeans],
    ideals: Sequence[str],
    draws: int,
    seeds: Sequence[int],
    needs: Needs = _NOTHING,
) -> BatchEstimate:
    """Estimate the losses of the sequences of a batch, layer by layer.

    Args:
        model: in evaluation mode.
        batch: the sequences.
        damage: measures the loss; it sees the output of the pass.
        layers: for each layer, the means that ideals are made of.
        ideals: names of ideal patterns, or "ablated", where the head gives its mean output.
        draws: how many random directions, each of which takes a backward pass.
        seeds: one for each sequence, from which its directions are drawn.
        needs: the activations that `plain` of the result keeps.
    """
    shown: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: dict[int, Tensor] = {}

    def look(layer: int, seeing: SeenKeys, pattern: Tensor) -> None:
        shown[layer] = pattern, seeing.visible(pattern)

    look_at_output = outputs.__setitem__ if "ablated" in ideals else None
    caught = dict.fromkeys(needs.points, torch.empty(0))
    with run_with_leaves(model, batch, range(len(layers)), look, look_at_output, caught) as (
        output,
        leaves,
    ):
        damage.see(output.detach(), batch)
        read = damage.rows(output, batch)
        every = draw_directions(read.detach(), damage, batch, draws, seeds)
        by_draw = [differentiate(read, leaves, direction) for direction in every]
    # a divergence is half the quadratic form of the change, a squared change the whole
    scale = (1.0 if damage.name == "nmse" else 0.5) / draws
    lost = []
    with torch.no_grad():
        for i, means in enumerate(layers):
            own = _LayerEstimate(*shown[i], means, batch, is_one_row=read.shape[1] == 1)
            of_pattern = [found[i] for found in by_draw]
            columns = []
            for ideal in ideals:
                if ideal == "ablated":
                    # the leaves of z come behind those of the patterns of all layers
                    of_output = [own.heads_first(found[len(layers) + i]) for found in by_draw]
                    columns.append(own.square(own.ablate(outputs[i]), of_output))
                else:
                    columns.append(own.square(own.change(ideal), of_pattern))
            lost.append(scale * torch.stack(columns, dim=2))
    mask = None if batch.lengths is None else batch.mask()
    plain = Pass(
        model, caught, tokens=batch.tokens, mask=mask, columns=batch.columns, needs=needs,
        output=output.detach(),
    )  # fmt: skip
    return BatchEstimate(lost, plain)


class _LayerEstimate:
    """Products of gradients and changes, of the heads of a layer.

    Args:
        pattern: float [batch, head, query, key], of the plain pass.
        visible: the keys that each query sees.
        means: of the layer.
        batch: the sequences.
        is_one_row: whether the output has one row, which all queries enter.
    """

    def __init__(
        self, pattern: Tensor, visible: Tensor, means: LayerMeans, batch: Batch, is_one_row: bool
    ) -> None:
        self.pattern, self.means = pattern, means
        self.is_one_row = is_one_row
        self.heads = list(range(pattern.shape[1]))
        self.real = mark_real_queries(batch, pattern).bool()[:, None]
        # the rows of padding are in no mean, and see nothing
        self.own = pattern.masked_fill(~self.real[..., None], 0)
        self.visible = visible & self.real[..., None]

    def change(self, ideal: str) -> Float[Tensor, "batch head query key"]:
        """Subtract the pattern from an ideal one."""
        made = make_ideal(ideal, self.pattern, self.visible, self.means, self.heads, self.own)
        return (made - self.pattern).masked_fill(~self.real[..., None], 0)

    def ablate(self, z: Tensor) -> Float[Tensor, "batch head query d_head"]:
        """Subtract the output z from its mean."""
        by_head = split_heads(z, len(self.heads))
        change = self.means.output_mean(by_head, self.heads, self.real[:, 0]) - by_head
        return change.transpose(1, 2).masked_fill(~self.real[..., None], 0)

    def heads_first(self, z: Tensor | None) -> Float[Tensor, "batch head query d_head"] | None:
        """Put heads before queries, as patterns have them."""
        return None if z is None else split_heads(z, len(self.heads)).transpose(1, 2)

    def square(
        self, change: Float[Tensor, "batch head query feature"], by_draw: Sequence[Tensor | None]
    ) -> Float[Tensor, "batch head"]:
        """Square the products with the gradient of each direction, and add them up.

        Products are squared query by query, or of all queries together where the output has one
        row. NaN without a gradient.
        """
        shape = (len(by_draw), *change.shape[:3])
        found = change.new_full(shape, torch.nan, dtype=torch.float64)
        for row, gradient in zip(found, by_draw, strict=True):
            if gradient is not None:
                row.copy_((gradient * change).double().sum(dim=-1))
        products = found.sum(dim=-1, keepdim=True) if self.is_one_row else found
        return products.square().sum(dim=(0, 3)).cpu()

"""What every head and ideal costs, to second order, from one pass and a few backward passes.

The directions are those of :mod:`~infoflow_lens.hooks.interventions.gradients`; each is a sign for
each row of the output, so that rows are independent. What an edit of the pattern, or of z, of a
query changes is squared *query by query* and then added up: between queries the products are noise
in a few draws. Where a sequence has one row alone, as an embedding, all queries enter it, so they
are added up before the square. An estimate may miss by far, where a replaced pattern moves the
model to where no derivative looks; so what decides a label is measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.progress import Advance
from infoflow_lens.foundation.seeds import derive_seed
from infoflow_lens.hooks.interventions.damage import Damage
from infoflow_lens.hooks.interventions.edits import split_heads
from infoflow_lens.hooks.interventions.gradients import differentiable, directions, gradients
from infoflow_lens.hooks.interventions.ideals import HeadIdeal, LayerMeans, make_ideal
from infoflow_lens.hooks.interventions.means import MeanPatterns
from infoflow_lens.hooks.interventions.passes import real_queries
from infoflow_lens.hooks.interventions.patterns import SeenKeys
from infoflow_lens.hooks.model.inputs import Batch, Batches

DRAWS = 4


class Estimates(NamedTuple):
    """Estimated losses.

    Attributes:
        lost: for every layer float64 [sequence, head, ideal], summed over the rows of a sequence;
            NaN where the output does not depend on the head.
        n_rows: int [sequence], the rows that count.
        per_row: what the loss of a row is divided by.
        forwards: passes over all sequences; a backward pass counts as one.
    """

    lost: list[Float[Tensor, "sequence head ideal"]]
    n_rows: Int[Tensor, " sequence"]
    per_row: float
    forwards: float


def estimate_ideals(
    model: nn.Module,
    batches: Batches,
    damage: Damage,
    means: MeanPatterns,
    ideals: Sequence[HeadIdeal],
    *,
    leaves_out: bool,
    draws: int = DRAWS,
    seed: int = 0,
    batch_size: int = 8,
    advance: Advance | None = None,
) -> Estimates:
    """Estimate what each sequence loses by each ideal of each head.

    Args:
        model: in evaluation mode.
        batches: the sequences.
        damage: what is lost; it sees the outputs.
        means: mean patterns and outputs.
        ideals: which.
        leaves_out: whether the sequences are among those of the means.
        draws: directions, a backward pass each.
        seed: of the directions, each sequence its own.
        batch_size: sequences in a pass.
        advance: called with the number of sequences that are done.
    """
    layers = [LayerMeans.select(means, i, leaves_out) for i in range(len(means.patterns))]
    lost: list[list[Tensor]] = [[] for _ in layers]
    rows: list[Tensor] = []
    done = 0
    for batch in batches.batches(batch_size):
        seeds = [derive_seed("labels", seed, done + i) for i in range(len(batch))]
        for found, part in zip(
            lost, _estimate_batch(model, batch, damage, layers, ideals, draws, seeds), strict=True
        ):
            found.append(part)
        rows.append(damage.counted(batch).sum(dim=1))
        done += len(batch)
        if advance is not None:
            advance(len(batch))
    return Estimates(
        [torch.cat(parts) for parts in lost], torch.cat(rows), damage.per_row(), 1.0 + draws
    )


def _estimate_batch(
    model: nn.Module,
    batch: Batch,
    damage: Damage,
    layers: Sequence[LayerMeans],
    ideals: Sequence[HeadIdeal],
    draws: int,
    seeds: Sequence[int],
) -> list[Float[Tensor, "sequence head ideal"]]:
    """Estimate the losses of the sequences of a batch, layer by layer."""
    shown: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: dict[int, Tensor] = {}

    def look(layer: int, seeing: SeenKeys, pattern: Tensor) -> None:
        shown[layer] = pattern, seeing.visible(pattern)

    numbers = range(len(layers))
    with differentiable(model, batch, numbers, look, outputs.__setitem__) as (output, leaves):
        damage.see(output.detach(), batch)
        read = damage.rows(output, batch)
        every = directions(read.detach(), damage, batch, draws, seeds, temperature=1.0)
        by_draw = [gradients(read, leaves, direction) for direction in every]
    half = 1.0 if damage.name == "nmse" else 0.5
    is_one_row = read.shape[1] == 1
    with torch.no_grad():
        return [
            half * _estimate_layer(
                *shown[i], outputs[i], [(g[i], g[len(layers) + i]) for g in by_draw],
                layers[i], ideals, is_one_row, batch,
            )
            for i in numbers
        ]  # fmt: skip


def _estimate_layer(
    pattern: Float[Tensor, "batch head query key"],
    visible: Tensor,
    z: Tensor,
    by_draw: Sequence[tuple[Tensor | None, Tensor | None]],
    means: LayerMeans,
    ideals: Sequence[HeadIdeal],
    is_one_row: bool,
    batch: Batch,
) -> Float[Tensor, "sequence head ideal"]:
    """Square the products of gradients and changes for the heads of a layer; mean over draws."""
    heads = list(range(pattern.shape[1]))
    by_head = split_heads(z, len(heads))
    real = real_queries(batch, pattern).bool()[:, None]
    padded = pattern.masked_fill(~real[..., None], 0)  # whose rows are in no mean
    found = torch.full((len(pattern), len(heads), len(ideals)), torch.nan, dtype=torch.float64)
    for column, ideal in enumerate(ideals):
        if ideal == "ablated":
            change = means.output_mean(by_head, heads, real[:, 0]) - by_head
        else:
            made = make_ideal(ideal, pattern, visible, means, heads, padded)
            change = (made - pattern).masked_fill(~real[..., None], 0)
        squares = []
        for of_pattern, of_z in by_draw:
            gradient = of_z if ideal == "ablated" else of_pattern
            if gradient is None:
                break
            if ideal == "ablated":
                product = split_heads(gradient, len(heads)).double() * change
                by_query = product.sum(dim=-1).transpose(1, 2).masked_fill(~real, 0)
            else:
                by_query = (gradient * change).double().sum(dim=-1)
            squares.append(
                by_query.sum(dim=-1).square() if is_one_row else by_query.square().sum(dim=-1)
            )
        if squares:
            found[:, :, column] = torch.stack(squares).mean(dim=0).cpu()
    return found

"""The maps of one set of features: what they have seen, what follows, and their errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.recovery.rows import RowBuffer, Rows
from infoflow_lens.hooks.recovery.statistics import CONSTANT, LinearFit, RegressionStatistics, Ridge


class Ratio(NamedTuple):
    """An error over a scale, for some groups; NaN where the scale is 0.

    Attributes:
        value: over all held-out rows.
        half_width: of the 95% interval; NaN with fewer than two blocks.
        sketch_error: standard error that comes from looking at some directions of the target.
    """

    value: Float[Tensor, " group"]
    half_width: Float[Tensor, " group"]
    sketch_error: Float[Tensor, " group"]


def measure_errors(
    blocks: Sequence[RegressionStatistics], fit: LinearFit, groups: slice, d_target: int
) -> tuple[Ratio, Ratio]:
    """Divide the held-out squared error by the targets' second moment, and by their variance.

    Args:
        blocks: statistics of the held-out rows, of different sequences in each block.
        fit: the maps of these groups.
        groups: which groups.
        d_target: dimensions of the targets before they were sketched.
    """
    present = [block for block in blocks if block.n]
    n = torch.tensor([float(block.n) for block in present], dtype=torch.float64)[:, None, None]
    error = torch.stack([block.error_sums(fit, groups).cpu() for block in present])
    moment = torch.stack([block.moment_sums(groups).cpu() for block in present])
    # every block has sums about a point of its own: move them to that of the first block
    point = present[0].shift_y.cpu()
    sums, squares = [], []
    for block in present:
        move = block.shift_y.cpu() - point
        sum_y = block.sum_y[groups].cpu()
        sums.append(sum_y + block.n * move)
        squares.append(block.squares[groups].cpu() + move * (2 * sum_y + block.n * move))
    n, error, moment, sum_y, square = map(
        _leave_out, (n, error, moment, torch.stack(sums), torch.stack(squares))
    )
    variance = square - sum_y.square() / n
    # a difference this small beside the two sums is a rounding error, not a variance
    constant = variance.sum(-1) <= CONSTANT * moment.sum(-1)
    variance = variance.masked_fill(constant[..., None], 0)
    ratios = []
    for scale in (moment, variance):
        total = scale.sum(dim=-1)
        value, *without_one = torch.where(total > 0, error.sum(dim=-1) / total, math.nan)
        sketch_error = _sketch_error(error[0], scale[0], value, d_target)
        ratios.append(Ratio(value, _half_width(torch.stack(without_one)), sketch_error))
    return ratios[0], ratios[1]


def _leave_out(
    blocks: Float[Tensor, "block group target"],
) -> Float[Tensor, "sum group target"]:
    """Sum over all blocks, and behind that over all but each."""
    total = blocks.sum(dim=0)
    return torch.cat([total[None], total - blocks])


def _half_width(without_one: Float[Tensor, "block group"]) -> Float[Tensor, " group"]:
    """Estimate a half-width by leaving out each block; NaN for one block."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    n_blocks = len(without_one)
    if n_blocks < 2:
        return torch.full_like(without_one[0], math.nan)
    spread = (without_one - without_one.mean(dim=0)).square().sum(dim=0)
    return float(stdtrit(n_blocks - 1, 0.975)) * ((n_blocks - 1) / n_blocks * spread).sqrt()


def _sketch_error(
    error: Float[Tensor, "group target"],
    scale: Float[Tensor, "group target"],
    ratio: Float[Tensor, " group"],
    d_target: int,
) -> Float[Tensor, " group"]:
    """Estimate the standard error of a ratio that is read off some directions of the target.

    The directions are orthonormal, like a sample without replacement, which is exact when it is
    whole.
    """
    seen = error.shape[-1]
    if seen >= d_target:
        return torch.zeros_like(ratio)
    off = (error - ratio[..., None] * scale).square().sum(dim=-1)
    whole = scale.sum(dim=-1)
    share = seen / (seen - 1) * (1 - seen / d_target) if seen > 1 else math.inf
    return torch.where(whole > 0, (share * off).sqrt() / whole, math.nan)


Shown: TypeAlias = list[tuple[Tensor, Tensor]]

ACCURACY_ROWS = 4096  # held-out rows of a layer that accuracy is measured on


@dataclass
class Maps:
    """What the maps of one set of features have seen: a layer's state, or a head's own output.

    Attributes:
        fit: rows to fit on.
        blocks: held-out rows, by blocks of sequences.
        shown: with one-hot targets, the first held-out rows: features [row, feature], and classes
            of the targets [row, group].
    """

    made_of: ClassVar[dict[str, type]] = {"fit": RowBuffer, "blocks": RowBuffer}

    fit: RowBuffer
    blocks: list[RowBuffer]
    shown: Shown = field(default_factory=list)

    @classmethod
    def read_pass(
        cls,
        rows: Sequence[tuple[int, Rows]],
        order: Int[Tensor, " row"],
        n_groups: int,
        *,
        capacity: int,
        n_blocks: int,
        n_classes: int,
    ) -> "Maps":
        """Read the statistics of one pass.

        Args:
            rows: with the index of their buffer; 0 is for fitting.
            order: of the held-out rows.
            n_groups: groups before those of controls.
            capacity: rows that come together before they are added.
            n_blocks: of held-out rows.
            n_classes: of one-hot targets; 0 for others.
        """
        few = max(1, capacity // n_blocks)  # all blocks wait for as many as the fit does
        fit = RowBuffer(capacity, n_classes)
        made = cls(fit, [RowBuffer(few, n_classes) for _ in range(n_blocks)])
        for index, some in rows:
            made.buffers()[index].append(some)
        held_out = [some for index, some in rows if index]
        if n_classes and held_out and len(order):
            # rows come by buffer, and `order` puts them back into that of the sequences
            first = order[:ACCURACY_ROWS]
            features = torch.cat([some.features for some in held_out])
            labels = torch.cat([some.values[some.chosen[:, :n_groups].long()] for some in held_out])
            made.shown = [(features[first], labels[first])]
        return made

    def buffers(self) -> list[RowBuffer]:
        """Return all buffers, the one for fitting first."""
        return [self.fit, *self.blocks]

    def merge(self, other: "Maps") -> None:
        """Add what others have seen."""
        for buffer, more in zip(self.buffers(), other.buffers(), strict=True):
            buffer.merge(more)
        for features, labels in other.shown:
            room = ACCURACY_ROWS - sum(len(x) for x, _ in self.shown)
            if room > 0:
                self.shown.append((features[:room], labels[:room]))


def merge_layers(layers: list[list[Maps]], others: list[list[Maps]]) -> list[list[Maps]]:
    """Return the maps of all layers, added up in place.

    Rows that wait are added first: only that can run out of memory, and then nothing is half done.
    """
    for sets in layers:
        for maps in sets:
            for buffer in maps.buffers():
                buffer.settle()
    for sets, more in zip(layers, others, strict=True):
        for maps, other in zip(sets, more, strict=True):
            maps.merge(other)
    return layers


@dataclass(frozen=True)
class Measured:
    """Errors of all groups, controls included; maps and accuracy of the first groups."""

    gram_rank: int
    second_moment: Ratio
    fvu: Ratio
    ridge: Float[Tensor, " group"]
    weight: Float[Tensor, "_kept _feature _target"]
    bias: Float[Tensor, "_kept _target"]
    accuracy: Float[Tensor, " _main"]


def measure_maps(maps: Maps, ridge: Ridge, d_target: int, n_main: int, keep_maps: bool) -> Measured:
    """Fit the maps, and measure their errors on the held-out rows.

    Args:
        maps: whose buffers are settled.
        ridge: see :class:`~infoflow_lens.hooks.recovery.statistics.NormalEquations`.
        d_target: dimensions of the targets before they were sketched.
        n_main: groups before those of controls.
        keep_maps: give the maps, too.
    """
    statistics = maps.fit.statistics
    equations = statistics.normal_equations(ridge)
    blocks = [block.statistics for block in maps.blocks]
    fits, second_moments, fvus, accuracies = [], [], [], []
    # groups of targets share the equations of their features
    for groups in statistics.parts():
        fit = statistics.fit_groups(equations, groups)
        second_moment, fvu = measure_errors(blocks, fit, groups, d_target)
        second_moments.append(second_moment)
        fvus.append(fvu)
        # groups behind the heads' are controls: their errors count, their maps are not kept
        n_kept = min(groups.stop, n_main) - groups.start
        if n_kept > 0 and maps.fit.n_classes:
            accuracies.append(
                _accuracy(maps.shown, fit, slice(groups.start, groups.start + n_kept))
            )
        kept = slice(max(0, n_kept) if keep_maps else 0)
        fits.append((fit.weight[kept].cpu(), fit.bias[kept].cpu(), fit.ridge.cpu()))
    weights, biases, penalties = zip(*fits, strict=True)
    return Measured(
        equations.rank,
        Ratio(*map(torch.cat, zip(*second_moments, strict=True))),
        Ratio(*map(torch.cat, zip(*fvus, strict=True))),
        torch.cat(penalties),
        torch.cat(weights),
        torch.cat(biases),
        torch.cat(accuracies) if accuracies else torch.zeros(0),
    )


def _accuracy(batches: Shown, fit: LinearFit, groups: slice) -> Float[Tensor, " group"]:
    """Find the share of rows, of those whose token is in the vocabulary, that are right."""
    device = fit.weight.device
    x = torch.cat([x.to(device) for x, _ in batches])[:ACCURACY_ROWS].double()
    labels = torch.cat([y.to(device) for _, y in batches])[:ACCURACY_ROWS, groups].T
    weight, bias = fit.weight[: len(labels)], fit.bias[: len(labels)]
    predicted = torch.stack(
        [(x @ w + b).argmax(dim=1) for w, b in zip(weight, bias, strict=True)]
    )  # [group, row]
    known = labels >= 0
    return (((predicted == labels) & known).sum(dim=1) / known.sum(dim=1)).double().cpu()

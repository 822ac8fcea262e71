"""The maps of one set of features: what they have seen, and what follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.hooks.recovery.buffer import RowBuffer, Rows
from infoflow_lens.hooks.recovery.errors import Ratio, measure_errors
from infoflow_lens.hooks.recovery.regression import LinearFit, Ridge

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
        ridge: see :class:`~infoflow_lens.hooks.recovery.regression.NormalEquations`.
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
        _join(second_moments),
        _join(fvus),
        torch.cat(penalties),
        torch.cat(weights),
        torch.cat(biases),
        torch.cat(accuracies) if accuracies else torch.zeros(0),
    )


def _join(parts: list[Ratio]) -> Ratio:
    return Ratio(
        torch.cat([part.value for part in parts]),
        torch.cat([part.half_width for part in parts]),
        torch.cat([part.sketch_error for part in parts]),
    )


def _accuracy(batches: Shown, fit: LinearFit, groups: slice) -> Float[Tensor, " group"]:
    """Share of rows, of those whose token is in the vocabulary, in which it is predicted."""
    device = fit.weight.device
    x = torch.cat([x.to(device) for x, _ in batches])[:ACCURACY_ROWS].double()
    labels = torch.cat([y.to(device) for _, y in batches])[:ACCURACY_ROWS, groups].T
    weight, bias = fit.weight[: len(labels)], fit.bias[: len(labels)]
    predicted = torch.stack(
        [(x @ w + b).argmax(dim=1) for w, b in zip(weight, bias, strict=True)]
    )  # [group, row]
    known = labels >= 0
    return (((predicted == labels) & known).sum(dim=1) / known.sum(dim=1)).double().cpu()

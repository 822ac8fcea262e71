"""Sums of linear regression, added to batch by batch and merged in any order; fits from them."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from infoflow_lens.foundation.settings import Positive, Remedy

Ridge: TypeAlias = Annotated[
    Positive | Literal["gcv"] | None,
    Remedy("None for least squares, a penalty, or 'gcv' for generalized cross-validation"),
]

_EPS = torch.finfo(torch.float64).eps
_LAMBDAS = (-12.0, 2.0)  # decades searched, relative to the Gram matrix's largest eigenvalue


@dataclass(frozen=True)
class LinearFit:
    """A linear map from features to many groups of targets, with intercept.

    Attributes:
        weight: [group, feature, target].
        bias: [group, target].
        rank: rank of the centred Gram matrix; below the number of features the map of least norm
            is given.
        ridge: [group], the penalty on the squared weights; 0 is least squares.
    """

    weight: Float[Tensor, "group feature target"]
    bias: Float[Tensor, "group target"]
    rank: int
    ridge: Float[Tensor, " group"]


class NormalEquations:
    """The centred Gram matrix of the features, factored once.

    Args:
        gram: centred.
        unit: the root of every feature's second moment. The rank is counted in units in which
            every feature has second moment 1: there rounding is the same for all entries. A Gram
            matrix squares the singular values of X, so directions smaller than about 1e-7 of their
            features cannot be told from rounding and are dropped.
        n: rows behind it.
        ridge: None for least squares, of least norm where features are dependent; a penalty; or
            "gcv".
    """

    def __init__(
        self,
        gram: Float[Tensor, "feature feature"],
        unit: Float[Tensor, " feature"],
        n: int,
        ridge: Ridge = None,
    ) -> None:
        gram = (gram + gram.T) / 2
        unit = torch.where(unit > 0, unit, 1)
        self._n, self._ridge = n, ridge
        # scaled to units, so that features of different size do not decide the rank
        eigenvalues, vectors = torch.linalg.eigh(gram / torch.outer(unit, unit))
        keep = eigenvalues > len(gram) * _EPS * 4
        self.rank = int(keep.sum())
        if ridge is None and keep.all():
            self._values, self._vectors = eigenvalues, vectors / unit[:, None]
        else:  # least norm, and a penalty, are meant in the features' own units
            eigenvalues, vectors = torch.linalg.eigh(gram)
            largest = slice(len(gram) - self.rank, None)
            self._values, self._vectors = eigenvalues[largest], vectors[:, largest]
        if ridge is None:
            self._inverse = (self._vectors / self._values) @ self._vectors.T

    def solve(
        self, moment: Float[Tensor, "feature group target"], squares: Float[Tensor, " group"]
    ) -> tuple[Float[Tensor, "feature group target"], Float[Tensor, " group"]]:
        """Return weights, and the penalty of each group.

        Args:
            moment: centred, of features and targets.
            squares: centred sums of squares of the targets.
        """
        n_groups = moment.shape[1]
        flat = moment.reshape(len(moment), -1)
        if self._ridge is None:
            weight = self._inverse @ flat
            return weight.view(moment.shape), moment.new_zeros(n_groups)
        rotated = (self._vectors.T @ flat).view(self.rank, *moment.shape[1:])
        if self._ridge == "gcv":
            penalty = self._choose_penalty(rotated.square().sum(dim=2), squares)
        else:
            penalty = moment.new_full((n_groups,), float(self._ridge))
        shrunk = rotated / (self._values[:, None] + penalty)[:, :, None]
        return (self._vectors @ shrunk.flatten(1)).view(moment.shape), penalty

    def _choose_penalty(
        self, rotated: Float[Tensor, "direction group"], squares: Float[Tensor, " group"]
    ) -> Float[Tensor, " group"]:
        """Choose every group's penalty of least n RSS / (n - df)^2 on a grid, refined once."""
        largest = self._values.max() if self.rank else squares.new_ones(())
        decades = torch.linspace(*_LAMBDAS, 57, dtype=torch.float64, device=squares.device)
        chosen = squares.new_zeros(squares.shape)
        step = float(decades[1] - decades[0])
        for refine in (False, True):
            if refine:  # around the best of the coarse grid
                decades = torch.linspace(-step, step, 41, device=squares.device).double()
            grid = decades[:, None] + (chosen if refine else 0)
            penalties = largest * 10 ** grid.expand(-1, len(squares))
            scores = torch.stack([self._gcv(rotated, squares, p) for p in penalties])
            chosen = grid.expand(-1, len(squares)).gather(0, scores.argmin(0)[None])[0]
        return largest * 10**chosen

    def _gcv(self, rotated: Tensor, squares: Tensor, penalty: Tensor) -> Tensor:
        values = self._values[:, None]
        kept = values / (values + penalty)
        # |y - f(x)|^2 in the directions of the Gram matrix, where the fit shrinks each by `kept`
        residual = squares - (rotated * (2 - kept) / (values + penalty)).sum(dim=0)
        freedom = self._n - 1 - kept.sum(dim=0)  # the intercept takes one
        # without freedom left the residual is rounding, and GCV is not defined
        score = self._n * residual.clamp(min=0) / freedom.square()
        return torch.where(freedom > 1e-6 * self._n, score, torch.inf)


CONSTANT = 1e-12  # a variance below this share of the second moment is rounding
_WIDE = 128  # from this many entries of a target on, summing features first is cheaper
_GATHERED = 2**21  # entries of targets that are copied at a time
_SMALL = 2**14  # accumulators of at most this many entries are multiplied in float64
_SOLVED = 2**23  # entries of maps that are solved for at a time

ALL = slice(None)
_TENSORS = ("shift_x", "shift_y", "sum_x", "gram", "sum_y", "cross", "squares")


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@dataclass(eq=False)
class RegressionStatistics:
    """First and second moments of features X [row, feature] and targets Y [row, group, target].

    All groups share one Gram matrix of the features. Sums are float64, so any split of the rows
    into batches and any order of merging gives the same result up to rounding: of order 1e-16 for
    float64 rows; for float32 rows only the products of features and targets are float32, over the
    rows of one call. Features and targets are taken about a fixed point near their means, the mean
    of the first rows, so that a mean far from 0 costs no digits.

    Memory: 8 (f^2 + f g t) bytes for f features and g groups of t targets.
    """

    n: int = 0
    groups_done: int = 0  # of rows whose addition was interrupted
    shift_x: Tensor = field(default_factory=_nothing)  # [feature]
    shift_y: Tensor = field(default_factory=_nothing)  # [target]
    sum_x: Tensor = field(default_factory=_nothing)  # [feature]; this and all below are shifted
    gram: Tensor = field(default_factory=_nothing)  # [feature, feature]
    sum_y: Tensor = field(default_factory=_nothing)  # [group, target]
    cross: Tensor = field(default_factory=_nothing)  # [feature, group, target]
    squares: Tensor = field(default_factory=_nothing)  # [group, target]

    def update(self, x: Float[Tensor, "row feature"], y: Float[Tensor, "row group target"]) -> None:
        """Add rows."""
        n_groups = y.shape[1]
        rows = torch.arange(len(x) * n_groups, device=x.device).view(len(x), n_groups)
        self.update_chosen(x, y.flatten(0, 1), rows)

    def update_chosen(
        self,
        x: Float[Tensor, "row feature"],
        values: Float[Tensor, "value target"],
        chosen: Int[Tensor, "row group"],
    ) -> None:
        """Add rows whose targets are ``values[chosen]``.

        Call it again with the same rows if memory ran out: it goes on where it stopped.
        """
        if not len(x):
            return
        self._begin(x, values.double().mean(dim=0), chosen.shape[1])
        counts = _counts(chosen, len(values))
        shifted = x.double() - self.shift_x
        targets = values.double() - self.shift_y
        sums = (shifted.sum(dim=0), _gram(shifted), counts @ targets, counts @ targets.square())
        # sums in float64, products in the precision that the device is fast in
        dtype = self._product_dtype(x, values)
        features, targets = shifted.to(dtype), targets.to(dtype)
        if values.shape[1] < _WIDE or x.is_cuda:
            self._add_chosen_rows(features, targets, chosen)
        else:
            self._add_distinct(features, targets, chosen)
        self._end(len(x), *sums)

    def update_classes(
        self,
        x: Float[Tensor, "row feature"],
        classes: Int[Tensor, " value"],
        chosen: Int[Tensor, "row group"],
        n_classes: int,
    ) -> None:
        """Add rows whose targets are one-hot, of the class ``classes[chosen]``; all 0 for -1.

        The product of features and one-hot targets is a sum of features by class.
        """
        if not len(x):
            return
        self._begin(x, x.new_zeros(n_classes, dtype=torch.float64), chosen.shape[1])
        shifted = x.double() - self.shift_x
        labels = classes.to(chosen.device)[chosen.long()].long()
        # tokens that are no class have a row of their own, which is left out
        labels = torch.where(labels < 0, n_classes, labels)
        counts = _counts(labels, n_classes + 1)[:, :n_classes]
        sums = (shifted.sum(dim=0), _gram(shifted), counts, counts)
        features = shifted.to(self._product_dtype(x, x))
        for group in range(self.groups_done, chosen.shape[1]):
            added = features.new_zeros(n_classes + 1, x.shape[1])
            added.index_add_(0, labels[:, group], features)
            self.cross[:, group] += added[:n_classes].T
            self.groups_done = group + 1
        self._end(len(x), *sums)

    def _begin(self, x: Tensor, shift_y: Tensor, n_groups: int) -> None:
        if self.gram.numel():
            return
        n_features, n_targets = x.shape[1], len(shift_y)
        zeros = torch.zeros(0, dtype=torch.float64, device=x.device).new_zeros
        self.shift_x, self.shift_y = x.double().mean(dim=0), shift_y
        self.sum_x = zeros(n_features)
        self.sum_y, self.squares = zeros(n_groups, n_targets), zeros(n_groups, n_targets)
        self.cross = zeros(n_features, n_groups, n_targets)
        self.gram = zeros(n_features, n_features)

    def _end(self, n: int, sum_x: Tensor, gram: Tensor, sum_y: Tensor, squares: Tensor) -> None:
        self.sum_x += sum_x
        self.gram += gram
        self.sum_y += sum_y
        self.squares += squares
        self.n += n
        self.groups_done = 0

    def _product_dtype(self, x: Tensor, values: Tensor) -> torch.dtype:
        """Choose float32, unless rows are float64, or products cheap, or wanted rough."""
        exact = torch.float64 in (x.dtype, values.dtype) or self.cross.numel() <= _SMALL
        rough = torch.get_float32_matmul_precision() != "highest"
        return torch.float64 if exact or rough else torch.float32

    def _add_chosen_rows(self, x: Tensor, values: Tensor, chosen: Tensor) -> None:
        n_groups = chosen.shape[1]
        step = max(1, _GATHERED // (len(x) * values.shape[1]))
        transposed = x.T.contiguous()
        for first in range(self.groups_done, n_groups, step):
            some = chosen[:, first : first + step].reshape(-1)
            targets = values.index_select(0, some).view(len(x), -1)
            product = transposed @ targets
            part = self.cross[:, first : first + step]
            part += product.view(part.shape)
            self.groups_done = min(first + step, n_groups)

    def _add_distinct(self, x: Tensor, values: Tensor, chosen: Tensor) -> None:
        """Add X^T (S E), computed as (S^T X)^T E over the values that some row chose.

        S selects values E for the rows X. Many rows choose the same value, and with causal
        attention about half of the values are chosen by no row.
        """
        ordered, rows = chosen.T.sort(dim=1)  # [group, row]
        starts = torch.ones_like(ordered, dtype=torch.bool)
        starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        for group in range(self.groups_done, chosen.shape[1]):
            offsets = starts[group].nonzero().flatten()
            distinct = ordered[group].index_select(0, offsets)
            added = embedding_bag(rows[group], x, offsets, mode="sum")
            product = added.T @ values.index_select(0, distinct)
            self.cross[:, group] += product
            self.groups_done = group + 1

    def merge(self, other: "RegressionStatistics") -> None:
        """Add the rows that `other` has seen."""
        if not other.n:
            return
        if not self.n:
            for name in _TENSORS:  # copies: they are another's running sums
                setattr(self, name, getattr(other, name).clone())
            self.n = other.n
            return
        device = self.gram.device
        sum_x, gram, sum_y, cross, squares = (
            getattr(other, name).to(device) for name in _TENSORS[2:]
        )
        move_x = other.shift_x.to(device) - self.shift_x  # to sums about this one's point
        move_y = other.shift_y.to(device) - self.shift_y
        # sums about another point: (x + d)(y + e) = xy + x e + d y + d e, for each sum
        moved_x, moved_y = sum_x + other.n * move_x, sum_y + other.n * move_y
        self.gram += gram + torch.outer(sum_x, move_x) + torch.outer(move_x, moved_x)
        self.squares += squares + move_y * (2 * sum_y + other.n * move_y)
        self.cross += cross
        self.cross.view(len(move_x), -1).addr_(move_x, moved_y.flatten())
        self.cross += torch.outer(sum_x, move_y)[:, None]
        self.sum_x += moved_x
        self.sum_y += moved_y
        self.n += other.n

    # What follows from the sums

    def _check(self) -> None:
        if not self.n:
            raise RuntimeError("statistics of no rows; update() first")

    def fit(self, ridge: Ridge = None) -> LinearFit:
        """Return the map of all groups; see :class:`NormalEquations`."""
        return self.fit_groups(self.normal_equations(ridge), ALL)

    def normal_equations(self, ridge: Ridge = None) -> NormalEquations:
        """Return the Gram matrix, factored for all groups."""
        self._check()
        mean = self.sum_x / self.n
        gram = self.gram - self.n * torch.outer(mean, mean)
        # second moments about 0 and not about the shift: they are the units of the features
        raw = self.gram.diagonal() + self.shift_x * (2 * self.sum_x + self.n * self.shift_x)
        return NormalEquations(gram, raw.clamp(min=0).sqrt(), self.n, ridge)

    def fit_groups(self, equations: NormalEquations, groups: slice) -> LinearFit:
        """Fit the maps of some groups by the factored equations that all groups share."""
        # axes of the products: f of features, g of groups, t of entries of the target
        mean_x, sum_y = self.sum_x / self.n, self.sum_y[groups]
        # about the means, so that the map is fitted without its intercept
        moment = self.cross[:, groups] - torch.einsum("f,gt->fgt", mean_x, sum_y)
        squares = (self.squares[groups] - sum_y.square() / self.n).sum(dim=1)
        weight, penalty = equations.solve(moment, squares)
        weight = weight.transpose(0, 1).contiguous()
        mean_y = sum_y / self.n + self.shift_y
        bias = mean_y - torch.einsum("f,gft->gt", mean_x + self.shift_x, weight)
        return LinearFit(weight, bias, equations.rank, penalty)

    def parts(self) -> list[slice]:
        """Return groups, so many at a time that their maps take little memory."""
        n_features, n_groups, n_targets = self.cross.shape
        step = max(1, _SOLVED // (n_features * n_targets))
        return [slice(first, min(first + step, n_groups)) for first in range(0, n_groups, step)]

    def error_sums(self, fit: LinearFit, groups: slice = ALL) -> Float[Tensor, "group target"]:
        """Sum over these rows of the squared error, for each group and entry of the target."""
        self._check()
        weight = fit.weight.to(self.gram.device)
        shift = torch.einsum("f,gft->gt", self.shift_x, weight) - self.shift_y
        # sums are about the shifts: there the map has the same weight and another intercept
        bias = fit.bias.to(self.gram.device) + shift
        sum_y = self.sum_y[groups]
        constant = torch.einsum("f,gft->gt", self.sum_x, weight)
        explained = torch.einsum("gft,fgt->gt", weight, self.cross[:, groups]) + bias * sum_y
        flat = weight.transpose(0, 1).reshape(len(self.gram), -1)
        predicted = ((self.gram @ flat) * flat).sum(dim=0).view(bias.shape)
        predicted = predicted + bias * (2 * constant + self.n * bias)
        # y^2 - 2 y f(x) + f(x)^2 over all rows; rounding may give less than 0
        return (self.squares[groups] - 2 * explained + predicted).clamp(min=0)

    def moment_sums(self, groups: slice = ALL) -> Float[Tensor, "group target"]:
        """Sum over these rows of y^2."""
        self._check()
        return self.squares[groups] + self.shift_y * (
            2 * self.sum_y[groups] + self.n * self.shift_y
        )

    def second_moment(self) -> Float[Tensor, " group"]:
        """Return the mean over these rows of ||y||^2, for every group."""
        return self.moment_sums().sum(dim=1) / self.n

    def variance(self) -> Float[Tensor, " group"]:
        """Return the mean over these rows of ||y - mean||^2, for every group."""
        second_moment = self.second_moment()
        variance = (self.squares / self.n - (self.sum_y / self.n).square()).sum(dim=1)
        # a difference this small beside the two sums is a rounding error, not a variance
        return torch.where(variance > CONSTANT * second_moment, variance, 0)

    @property
    def n_features(self) -> int:
        """The number of features, without the intercept."""
        self._check()
        return self.gram.shape[0]


def _counts(chosen: Int[Tensor, "row group"], n_values: int) -> Float[Tensor, "group value"]:
    """Count how often each group chose each value."""
    counts = torch.zeros(chosen.shape[1], n_values, dtype=torch.float64, device=chosen.device)
    ones = counts.new_ones(1, 1).expand(chosen.shape[1], len(chosen))
    return counts.scatter_add_(1, chosen.T.long(), ones)


def _gram(x: Float[Tensor, "row feature"]) -> Float[Tensor, "feature feature"]:
    """Return X^T X; for many features by blocks, since half of it is the other half."""
    n_blocks = 4 if x.shape[1] >= 512 else 1
    gram = x.new_empty(x.shape[1], x.shape[1])
    size = -(-x.shape[1] // n_blocks)
    for first in range(0, x.shape[1], size):
        block = x[:, first : first + size].T @ x[:, first:]
        gram[first : first + size, first:] = block
        gram[first:, first : first + size] = block.T
    return gram

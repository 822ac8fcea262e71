"""Least squares and ridge regression from sums, one Gram matrix for many targets."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

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
        """Weights, and the penalty of each group.

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

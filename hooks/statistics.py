"""Sufficient statistics of linear regression: added to batch by batch, merged in any order."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class LinearFit:
    """The least-squares map from features to many groups of targets, with intercept.

    Attributes:
        weight: [group, feature, target].
        bias: [group, target].
        rank: rank of the centred Gram matrix; below the number of features the map of least norm
            is given.
    """

    weight: Float[Tensor, "group feature target"]
    bias: Float[Tensor, "group target"]
    rank: int


_CONSTANT = 1e-12  # a variance below this share of the second moment is rounding


class RegressionStatistics:
    """First and second moments of features X [row, feature] and targets Y [row, group, target].

    All groups share one Gram matrix of the features. Everything is float64: moments are sums, so
    any split of the rows into batches and any order of merging gives the same result up to
    rounding of order 1e-16.
    """

    def __init__(self) -> None:
        self.n = 0
        self._features: Tensor | None = None  # [1 + feature, 1 + feature], of (1, X)
        self._cross: Tensor | None = None  # [1 + feature, group * target]
        self._squares: Tensor | None = None  # [group, target]

    def update(self, x: Float[Tensor, "row feature"], y: Float[Tensor, "row group target"]) -> None:
        """Add rows."""
        if not len(x):
            return
        ones = torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
        augmented = torch.cat([ones, x.double()], dim=1)
        y = y.double()
        self._add(
            len(x),
            augmented.T @ augmented,
            augmented.T @ y.flatten(1),
            y.square().sum(dim=0),
        )

    def merge(self, other: "RegressionStatistics") -> None:
        """Add the rows that `other` has seen."""
        if other.n:
            assert other._features is not None
            assert other._cross is not None
            assert other._squares is not None
            self._add(other.n, other._features, other._cross, other._squares)

    def _add(self, n: int, features: Tensor, cross: Tensor, squares: Tensor) -> None:
        if self._features is None or self._cross is None or self._squares is None:
            # copies: what was handed over may be another's running sum
            self._features, self._cross, self._squares = (
                part.cpu().clone() for part in (features, cross, squares)
            )
        else:
            self._features += features.to(self._features.device)
            self._cross += cross.to(self._cross.device)
            self._squares += squares.to(self._squares.device)
        self.n += n

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._features is None or self._cross is None or self._squares is None:
            raise RuntimeError("statistics of no rows; update() first")
        return self._features, self._cross, self._squares

    def fit(self) -> LinearFit:
        """Least squares with an intercept; of least norm where features are dependent.

        The rank is that of the centred Gram matrix, in units in which every feature has second
        moment 1: there rounding is the same for all entries. A Gram matrix squares the singular
        values of X, so directions smaller than about 1e-7 of their features cannot be told from
        rounding and are dropped.
        """
        features, cross, squares = self._moments()
        mean_x = features[0, 1:] / self.n
        mean_y = cross[0] / self.n
        gram = features[1:, 1:] - self.n * torch.outer(mean_x, mean_x)
        moment = cross[1:] - self.n * torch.outer(mean_x, mean_y)
        gram = (gram + gram.T) / 2
        unit = features[1:, 1:].diagonal().sqrt()
        unit = torch.where(unit > 0, unit, 1)
        eigenvalues, vectors = torch.linalg.eigh(gram / torch.outer(unit, unit))
        keep = eigenvalues > len(gram) * torch.finfo(torch.float64).eps * 4
        if keep.all():
            scaled = (vectors.T @ (moment / unit[:, None])) / eigenvalues[:, None]
            weight = vectors @ scaled / unit[:, None]
        else:  # least norm is meant in the features' own units
            eigenvalues, vectors = torch.linalg.eigh(gram)
            largest = slice(len(gram) - int(keep.sum()), None)
            scaled = (vectors.T @ moment)[largest] / eigenvalues[largest, None]
            weight = vectors[:, largest] @ scaled
        bias = mean_y - mean_x @ weight
        n_groups, n_targets = squares.shape
        return LinearFit(
            weight.view(-1, n_groups, n_targets).transpose(0, 1).contiguous(),
            bias.view(n_groups, n_targets),
            int(keep.sum()),
        )

    def squared_error(self, fit: LinearFit) -> Float[Tensor, " group"]:
        """Mean over these rows of ||y - prediction||^2, for every group."""
        features, cross, squares = self._moments()
        n_groups, n_targets = squares.shape
        coefficients = torch.cat([fit.bias[:, None], fit.weight], dim=1)  # [group, 1 + f, target]
        cross = cross.view(-1, n_groups, n_targets).transpose(0, 1)
        explained = (coefficients * cross).sum(dim=(1, 2))
        predicted = torch.einsum("gft,fh,ght->g", coefficients, features, coefficients)
        error = squares.sum(dim=1) - 2 * explained + predicted
        return error.clamp(min=0) / self.n

    def second_moment(self) -> Float[Tensor, " group"]:
        """Mean over these rows of ||y||^2, for every group."""
        return self._moments()[2].sum(dim=1) / self.n

    def variance(self) -> Float[Tensor, " group"]:
        """Mean over these rows of ||y - mean||^2, for every group."""
        _, cross, squares = self._moments()
        mean = cross[0].view_as(squares) / self.n
        variance = (squares / self.n - mean.square()).sum(dim=1)
        # the difference of two sums of that size is rounding, and no variance at all
        rounding = _CONSTANT * self.second_moment()
        return torch.where(variance > rounding, variance, 0)

    @property
    def n_features(self) -> int:
        """The number of features, without the intercept."""
        return self._moments()[0].shape[0] - 1

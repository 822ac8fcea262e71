"""How well the attended token can be read off the state: linear recovery maps (eq 56)."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from infoflow_lens.hooks.capabilities import (
    attention_hooks,
    attention_scores,
    check_finite,
    check_keys,
    layer_count,
    post_attention_hooks,
    state_sum,
    token_hook,
)
from infoflow_lens.hooks.passes import Pass
from infoflow_lens.hooks.probe import Probe
from infoflow_lens.hooks.ranking import check_rank_support, check_ranks, rank_keys
from infoflow_lens.hooks.result import Result
from infoflow_lens.hooks.statistics import RegressionStatistics
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, NothingMeasuredError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False, kw_only=True)
class RecoveryResult(Result):
    """Errors of the recovery maps, and the maps.

    Attributes:
        ranks: the ranks, in the order of the rank axis.
        second_moment: for each layer [head, rank]: mean squared error over the mean squared norm
            of the target (eq 56). A map that knows nothing scores below 1 wherever the attended
            tokens have a mean.
        fvu: for each layer [head, rank]: mean squared error over the variance of the target, the
            fraction of variance unexplained. A map that knows nothing scores 1.
        n_fit, n_eval: for each layer, the rows (sequence, query) of the fit and of the errors.
        gram_rank: for each layer, the rank of the features' covariance; below d_model the map of
            least norm was taken.
        weight: for each layer [head, rank, d_model, d_target], the maps.
        bias: for each layer [head, rank, d_target].
    """

    ranks: tuple[int, ...]
    second_moment: tuple[Float[Tensor, "_head rank"], ...]
    fvu: tuple[Float[Tensor, "_head rank"], ...]
    n_fit: tuple[int, ...]
    n_eval: tuple[int, ...]
    gram_rank: tuple[int, ...]
    weight: tuple[Float[Tensor, "_head rank d_model d_target"], ...]
    bias: tuple[Float[Tensor, "_head rank d_target"], ...]

    def to_frame(self) -> "pd.DataFrame":
        """One row for each layer, head and rank."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layer": layer,
                    "head": head,
                    "rank": rank,
                    "second_moment": float(self.second_moment[layer][head, column]),
                    "fvu": float(self.fvu[layer][head, column]),
                    "n_fit": self.n_fit[layer],
                    "n_eval": self.n_eval[layer],
                }
                for layer in range(len(self.fvu))
                for head in range(len(self.fvu[layer]))
                for column, rank in enumerate(self.ranks)
            ]
        )

    def plot(self, error: str = "fvu") -> "go.Figure":
        """Errors ("fvu" or "second_moment") per head, a colour for each rank."""
        import plotly.express as px

        frame = self.to_frame().astype({"rank": str})
        frame["head"] = "L" + frame["layer"].astype(str) + "H" + frame["head"].astype(str)
        return px.bar(
            frame, x="head", y=error, color="rank", barmode="group", title="Recovery error"
        )


class RecoveryProbe(Probe[RecoveryResult]):
    """Linear maps, with intercept, from the post-attention state to the token attended at rank k.

    For every layer, head i and rank k, over token positions t: x'(t) -> x(s_i(t)), where s_i(t)
    is the key of the k-th largest score (Yu, Jiang, Bao, Li 2026, App. C.1, eq 56). Tokens are the
    input vectors, or for models over token ids their embeddings. Positions beyond the tokens (CLS)
    take no part. Maps are fitted on some sequences and their errors measured on others; both are
    computed from sums, so memory does not grow with the data. Queries for which a requested rank
    of some head is undefined (masks) or falls on CLS (where that is a key) are left out for all
    heads and ranks of the layer, which then share one Gram matrix; the notes count them.

    The paper says "linear map" and normalises by the second moment; the intercept and the second
    error, `fvu`, are our choice (a map without information scores 1 there).

    Args:
        ranks: which ranks; 1 is the argmax.

    Raises:
        InfoFlowError: for ranks below 1 or beyond the number of keys, or without sequences to fit
            and to evaluate on.
    """

    def __init__(self, ranks: Sequence[int] = (1,)) -> None:
        super().__init__()
        self.ranks = check_ranks(ranks)
        self._fit: list[RegressionStatistics] = []
        self._evaluation: list[RegressionStatistics] = []
        self._n_heads: list[int] = []
        self._left_out: list[int] = []

    def config(self) -> Mapping[str, Any]:
        """The settings, as JSON-compatible values."""
        return {"ranks": list(self.ranks)}

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse ranks and splits that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, n_keys)
        if n_fit is not None and n_evaluate is not None and min(n_fit, n_evaluate) < 1:
            raise InfoFlowError(
                f"RecoveryProbe has {n_fit} sequences to fit on and {n_evaluate} held out: "
                "expected at least one of each; pass more inputs, eval_inputs, or a smaller "
                "eval_every"
            )

    def _hook_points(self, model: nn.Module) -> tuple[str, ...]:
        names = [token_hook(model)]
        for layer in range(layer_count(model)):
            names += [*attention_hooks(model, layer)[0], *post_attention_hooks(model, layer)]
        return tuple(names)

    def _optional_points(self, model: nn.Module) -> tuple[str, ...]:
        layers = range(layer_count(model))
        return tuple(name for layer in layers for name in attention_hooks(model, layer)[1])

    def _update(self, model: nn.Module, seen: Pass) -> None:
        tokens = seen.activations[token_hook(model)]
        held_out = seen.held_out
        real = seen.is_real(tokens.shape[1])
        layers = []
        for layer in range(layer_count(model)):
            scores = attention_scores(seen.activations, layer, seen.first)
            state = state_sum(seen.activations, post_attention_hooks(model, layer))
            check_keys(scores, state, f"layer {layer}")
            check_finite(state, f"the post-attention state of layer {layer}", seen.first)
            layers.append(self._rows(tokens, state, scores))
        if not self._fit:
            self._fit = [RegressionStatistics() for _ in layers]
            self._evaluation = [RegressionStatistics() for _ in layers]
            self._n_heads = [y.shape[2] // len(self.ranks) for _, y, _ in layers]
            self._left_out = [0 for _ in layers]
        for layer, (x, y, valid) in enumerate(layers):
            self._left_out[layer] += int((~valid & real.to(valid.device)).sum())
            for rows, statistics in (
                (~held_out, self._fit[layer]),
                (held_out, self._evaluation[layer]),
            ):
                chosen = valid & rows.to(valid.device)[:, None]
                statistics.update(x[chosen], y[chosen])

    def _rows(
        self,
        tokens: Float[Tensor, "batch source d_target"],
        state: Float[Tensor, "batch pos d_model"],
        scores: Float[Tensor, "batch head pos key"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features [batch, query, d_model], targets [batch, query, head * rank, d_target], and
        which of these rows are defined."""
        n_source = tokens.shape[1]
        positions = rank_keys(scores[:, :, :n_source], self.ranks).positions.long()
        per_query = rearrange(positions, "batch head query rank -> batch query (head rank)")
        valid = ((per_query >= 0) & (per_query < n_source)).all(dim=-1)
        sequences = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        targets = tokens[sequences, per_query.clamp(0, n_source - 1)]
        return state[:, :n_source], targets, valid

    def _merge(self, other: "RecoveryProbe") -> None:
        if not self._fit:
            self._fit = [RegressionStatistics() for _ in other._fit]
            self._evaluation = [RegressionStatistics() for _ in other._evaluation]
            self._n_heads = list(other._n_heads)
            self._left_out = [0 for _ in other._left_out]
        self._left_out = [a + b for a, b in zip(self._left_out, other._left_out, strict=True)]
        for mine, theirs in zip(self._fit, other._fit, strict=True):
            mine.merge(theirs)
        for mine, theirs in zip(self._evaluation, other._evaluation, strict=True):
            mine.merge(theirs)

    def _result(self) -> RecoveryResult:
        notes = list(self._notes())
        columns: dict[str, list[Any]] = {
            name: [] for name in ("second_moment", "fvu", "gram_rank", "weight", "bias")
        }
        for layer, (fitted, evaluated) in enumerate(zip(self._fit, self._evaluation, strict=True)):
            if not fitted.n or not evaluated.n:
                raise NothingMeasuredError(
                    f"layer {layer} has {fitted.n} rows to fit on and {evaluated.n} held out "
                    f"(of {self.n_sequences} sequences): expected both; run more sequences, a "
                    "smaller eval_every, or lower ranks"
                )
            if self._left_out[layer]:
                notes.append(
                    f"layer {layer}: {self._left_out[layer]} rows left out, where a requested rank "
                    "of some head is undefined or falls on a position that is no token"
                )
            fit = fitted.fit()
            if fit.rank < fitted.n_features:
                note = (
                    f"layer {layer}: rank-deficient fit, rank {fit.rank} of "
                    f"{fitted.n_features} features from {fitted.n} rows; the map of least norm "
                    "was taken"
                )
                notes.append(note)
                if fitted.n <= fitted.n_features:  # too few rows, not a property of the model
                    warnings.warn(note, InfoFlowWarning, stacklevel=3)
            shape = (self._n_heads[layer], len(self.ranks))
            error = evaluated.squared_error(fit)
            for name, scale in (
                ("second_moment", evaluated.second_moment()),
                ("fvu", evaluated.variance()),
            ):
                ratio = torch.where(scale > 0, error / scale, math.nan)
                columns[name].append(ratio.view(shape))
            columns["gram_rank"].append(fit.rank)
            columns["weight"].append(fit.weight.view(*shape, *fit.weight.shape[1:]))
            columns["bias"].append(fit.bias.view(*shape, -1))
        return RecoveryResult(
            ranks=self.ranks,
            n_fit=tuple(statistics.n for statistics in self._fit),
            n_eval=tuple(statistics.n for statistics in self._evaluation),
            record=self._run_record(),
            notes=tuple(notes),
            **{name: tuple(values) for name, values in columns.items()},
        )

"""Errors of recovery maps, and the maps."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.record import model_fingerprint, weight_processing
from infoflow_lens.hooks.arrays import LabelledArray, frame_of
from infoflow_lens.hooks.result import Result

_OPTIONAL = (
    "second_moment_low",
    "second_moment_high",
    "fvu_low",
    "fvu_high",
    "second_moment_sketch_error",
    "fvu_sketch_error",
    "accuracy",
    "ridge",
)


@dataclass(frozen=True, eq=False, kw_only=True)
class RecoveryResult(Result):
    """Errors of the recovery maps, and the maps.

    Fields from `second_moment_low` on are empty where they were not asked for or do not apply.

    Attributes:
        ranks: the ranks, in the order of the rank axis.
        second_moment: for each layer [head, rank]: mean squared error over the mean squared norm
            of the target (eq 56). A map that knows nothing scores below 1 wherever the attended
            tokens have a mean.
        fvu: for each layer [head, rank]: mean squared error over the variance of the target, the
            fraction of variance unexplained. A map that knows nothing scores 1.
        n_fit, n_eval: for each layer, the rows (sequence, query) of the fit and of the errors.
        gram_rank: for each layer, the rank of the features' covariance, of the head of least rank
            where heads have features of their own; below the number of features the map of least
            norm was taken.
        n_features: for each layer, what the maps read; rows of no greater number fit anything.
        weight: for each layer [head, rank, d_model, d_target], the maps.
        bias: for each layer [head, rank, d_target].
        second_moment_low, second_moment_high, fvu_low, fvu_high: for each layer [head, rank], the
            95% interval over held-out sequences, of the error of this map.
        second_moment_sketch_error, fvu_sketch_error: for each layer [head, rank], the standard
            error that comes from sketching the targets.
        ridge: for each layer [head, rank], the penalty on the squared weights.
        controls: names of the controls, in the order of the control axis.
        control_second_moment, control_fvu: for each layer [control, head, rank], the errors of maps
            of the same kind that were fitted to reconstruct the control's token.
        accuracy: for each layer [head, rank], the share of held-out rows in which the class of the
            largest predicted value is the attended token's.
    """

    small: ClassVar[bool] = True

    ranks: tuple[int, ...]
    second_moment: tuple[Float[Tensor, "_head rank"], ...]
    fvu: tuple[Float[Tensor, "_head rank"], ...]
    n_fit: tuple[int, ...]
    n_eval: tuple[int, ...]
    gram_rank: tuple[int, ...]
    weight: tuple[Float[Tensor, "_head rank _feature _target"], ...]
    bias: tuple[Float[Tensor, "_head rank _target"], ...]
    n_features: tuple[int, ...] = ()
    second_moment_low: tuple[Float[Tensor, "_head rank"], ...] = ()
    second_moment_high: tuple[Float[Tensor, "_head rank"], ...] = ()
    fvu_low: tuple[Float[Tensor, "_head rank"], ...] = ()
    fvu_high: tuple[Float[Tensor, "_head rank"], ...] = ()
    second_moment_sketch_error: tuple[Float[Tensor, "_head rank"], ...] = ()
    fvu_sketch_error: tuple[Float[Tensor, "_head rank"], ...] = ()
    ridge: tuple[Float[Tensor, "_head rank"], ...] = ()
    controls: tuple[str, ...] = ()
    control_second_moment: tuple[Float[Tensor, "control _head rank"], ...] = ()
    control_fvu: tuple[Float[Tensor, "control _head rank"], ...] = ()
    accuracy: tuple[Float[Tensor, "_head rank"], ...] = ()

    @property
    def too_few_rows(self) -> tuple[int, ...]:
        """List the layers whose maps had no more rows than features, so that any target fits.

        None where a penalty keeps the maps from that.
        """
        if self.record.config.get("ridge") is not None:
            return ()
        pairs = zip(self.n_features, self.n_fit, strict=False)  # not known of older results
        return tuple(layer for layer, (features, rows) in enumerate(pairs) if rows <= features)

    def describe_too_few_rows(self) -> str:
        """Say which layers' errors say nothing, and why; empty for none."""
        layers = self.too_few_rows
        if not layers:
            return ""
        return (
            f"layers {', '.join(map(str, layers))}, where the maps were fitted on "
            f"{min(self.n_fit[layer] for layer in layers)} rows, fewer than features, so that "
            "their errors say nothing; give more sequences."
        )

    def sentences(self) -> list[str]:
        """Name the head whose token is recovered with the smallest error."""
        frame = self.to_frame().dropna(subset="fvu").sort_values("fvu")
        frame = frame[~frame["layer"].isin(self.too_few_rows)]
        if frame.empty and self.too_few_rows:
            return [f"recovery: Not shown: {self.describe_too_few_rows()}"]
        if frame.empty:
            return ["recovery: no error is known, as no token that a head attends to changes"]
        if frame["fvu"].iloc[0] >= 1:
            return ["recovery: no head gives its token back better than the mean does"]
        best = frame.iloc[0]
        return [
            f"recovery: best head {best['layer']:.0f}.{best['head']:.0f} at rank "
            f"{best['rank']:.0f} leaves {best['fvu']:.1%} of the variance unexplained"
        ]

    def apply(
        self,
        state: Float[Tensor, "*row feature"],
        layer: int,
        head: int,
        rank: int,
        *,
        model: nn.Module,
    ) -> Float[Tensor, "*row target"]:
        """Apply a map to states of `model`: it gives the target, or the sketch that was fitted.

        Args:
            state: what the map was fitted on (the record's `source`), at any positions.
            layer: the layer.
            head: the head.
            rank: the rank, one of `ranks`.
            model: the model that the states come from.

        Raises:
            InfoFlowError: if it is not the model that was measured, if there is no such map, or
                states have another size.
        """
        self.check_model(model)
        if not self.weight:
            raise InfoFlowError("maps were not kept: probe with RecoveryProbe(maps=True)")
        n_heads = [len(weight) for weight in self.weight]
        if not 0 <= layer < len(n_heads) or not 0 <= head < n_heads[layer]:
            raise InfoFlowError(
                f"there is no map for layer {layer}, head {head}: the layers have {n_heads} heads"
            )
        if rank not in self.ranks:
            raise InfoFlowError(f"rank is {rank}: the maps are for ranks {self.ranks}")
        column = self.ranks.index(rank)
        weight, bias = self.weight[layer][head, column], self.bias[layer][head, column]
        if state.shape[-1] != len(weight):
            raise InfoFlowError(
                f"states have {state.shape[-1]} features: expected {len(weight)}, as fitted"
            )
        # at least the precision in which the map is kept
        dtype = torch.promote_types(state.dtype, torch.float32)
        return state.to(dtype) @ weight.to(state.device, dtype) + bias.to(state.device, dtype)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model in whose states these maps mean nothing.

        Raises:
            InfoFlowError: if its weights or their processing are others than those measured.
        """
        processed = weight_processing(model)
        if dict(self.record.weight_processing) != processed:
            raise InfoFlowError(
                f"the maps were fitted with weight processing "
                f"{dict(self.record.weight_processing)}, this model has {processed}: folding "
                "changes the basis of the states; load the model as it was, or fit again"
            )
        found = model_fingerprint(model)
        if self.record.model_fingerprint != found:
            raise InfoFlowError(
                f"the maps were fitted on model {self.record.model_fingerprint}, this is {found} "
                "(other weights, or another precision): fit again"
            )

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for each layer, head and rank."""
        arrays = self.arrays
        rows = [("n_fit", self.n_fit), ("n_eval", self.n_eval)]
        columns = [
            arrays["second_moment"],
            arrays["fvu"],
            *(LabelledArray(name, torch.tensor(n), ("layer",)) for name, n in rows),
            *(arrays[name] for name in _OPTIONAL if name in arrays),
        ]
        # each control has its two columns behind the heads' own
        for control in self.controls:
            for error in ("second_moment", "fvu"):
                array = arrays[f"control_{error}"].select(control=control)
                columns.append(replace(array, name=f"{error}_{control}"))
        return frame_of(columns)

    def plot(self, error: str = "fvu") -> "mpl.Figure":
        """Errors ("fvu" or "second_moment") of heads, a panel for each layer."""
        return super().plot(error)

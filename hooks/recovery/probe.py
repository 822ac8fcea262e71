"""How well the attended token can be read off the state: linear recovery maps (eq 56)."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, NothingMeasuredError
from infoflow_lens.foundation.lazy import mpl, pd
from infoflow_lens.foundation.record import model_fingerprint, weight_processing
from infoflow_lens.foundation.settings import BothEnds, Count, Positions, Ranks, Seed
from infoflow_lens.hooks.model.points import check_finite, position_count
from infoflow_lens.hooks.passes.ranking import check_rank_support
from infoflow_lens.hooks.passes.view import Needs, Pass
from infoflow_lens.hooks.probe import Probe, describe_setting
from infoflow_lens.hooks.recovery.maps import (
    ACCURACY_ROWS,
    Maps,
    Measured,
    Ratio,
    measure_maps,
    merge_layers,
)
from infoflow_lens.hooks.recovery.rows import (
    CONTROLS,
    Control,
    LayerRows,
    RowMaker,
    Source,
    Target,
    TargetOfMaps,
    move_valid,
    parts_of,
    rows_of,
    sketch_matrix,
)
from infoflow_lens.hooks.recovery.statistics import Ridge
from infoflow_lens.hooks.result import LabelledArray, Result, frame_of
from infoflow_lens.hooks.states import combined, latest, summed

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
        weight, bias = (
            self.array(name, layer=layer, head=head, rank=rank).to_tensor()
            for name in ("weight", "bias")
        )
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
        self.record.check_model(model_fingerprint(model), "the maps were fitted on", "fit again")

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
        """Draw errors ("fvu" or "second_moment") of heads, a panel for each layer."""
        return super().plot(error)


_BLOCKS, _BLOCK_BYTES = 8, 2**28  # the default, if the blocks need at most this memory


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

    Memory, for each layer with h heads, r ranks, d features and targets of t dimensions:
    8 d (d + h r t) bytes for the fit, and as much for each block of held-out sequences, besides
    about `buffer_rows` rows that wait for each of the two. A sketch makes t small; `controls` add
    h r + 2 to h r.

    Args:
        ranks: which ranks; 1 is the argmax.
        target: what to reconstruct: "embedding", the token's vector; ("resid_pre", layer), its
            residual stream before a layer; "identity", its id, one-hot, with the accuracy of the
            largest entry; a table [d_vocab, d]; or a function from tokens to [batch, pos, d].
        source: what to read: "post_attention", "resid_post", or "head", each head's own output
            before W_O.
        vocabulary: with "identity", the token ids to distinguish, if not all; another token
            has no entry.
        without: positions left out as keys and as queries, such as (0,) for a BOS token or
            (-1,) for the last position of each sequence.
        controls: maps of the same kind to other tokens, for comparison: "random", a random allowed
            key; "shuffled", the position that the head chose at this rank in the sequence before
            (where there is none, a random key); "self", the query's own token. True for all.
        ridge: None for least squares; a penalty on the squared weights; or "gcv", for each map the
            penalty of least generalized cross-validation error.
        blocks: held-out sequences are dealt to so many blocks in turn, for 95% intervals by
            leaving out each; 1 for no intervals. Default, 8 where they take at most 256 MiB.
        sketch: look at the targets in so many random orthonormal directions; the standard error of
            this stands beside the errors.
        maps: keep the maps in the result.
        seed: of the sketch and of the random keys.
        buffer_rows: rows that come together before they are added to the sums.

    Raises:
        InfoFlowError: for ranks below 1 or beyond the number of keys, settings that are none of
            these, or without sequences to fit and to evaluate on.
    """

    by_index: ClassVar[bool] = True  # the place of a sequence decides whether it is held out

    ranks: Ranks = (1,)
    _: KW_ONLY
    target: Target = "embedding"
    source: Source = "post_attention"
    vocabulary: Positions | None = None
    without: BothEnds = ()
    controls: bool | tuple[Control, ...] = False
    ridge: Ridge = None
    blocks: Count | None = None
    sketch: Annotated[int, Ge(2)] | None = None
    maps: bool = True
    seed: Seed = 0
    buffer_rows: Count = 4096

    statistics = combined(merge_layers, Maps)  # for each layer, its sets of features
    left_out = summed()  # [layer], rows
    last = combined(latest)  # for each layer, the keys of the last sequence
    n_heads = combined(latest)
    d_target = combined(latest)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = CONTROLS if self.controls is True else self.controls or ()
        self.controls = self._controls = tuple(name for name in CONTROLS if name in given)
        self._targets = TargetOfMaps(self.target, self.vocabulary)
        if self.sketch and self._targets.is_identity:
            raise InfoFlowError(
                "target is 'identity' with a sketch: expected one of them; sketched classes have "
                "no accuracy, so state a smaller vocabulary instead"
            )
        describe_setting(self.target)  # refused here, if it cannot stand in a record

    def check(self, n_fit: int | None, n_evaluate: int | None, n_keys: int) -> None:
        """Refuse ranks and splits that the data do not allow; see :meth:`Probe.check`."""
        check_rank_support(self.ranks, self.without, n_keys)
        if n_fit is not None and n_evaluate is not None and min(n_fit, n_evaluate) < 1:
            raise InfoFlowError(
                f"RecoveryProbe has {n_fit} sequences to fit on and {n_evaluate} held out: "
                "expected at least one of each; pass more inputs, eval_inputs, or a smaller "
                "eval_every"
            )

    def needs(self, model: nn.Module) -> Needs:
        """Name the scores to rank, the states that are read, and what targets are made of."""
        return Needs.of(
            model,
            ranks=self.ranks,
            without=self.without,
            states=(self.source,),
            tokens=True,
            points=self._targets.points(model),
        )

    def update(self, seen: Pass) -> Mapping[str, Any]:
        """Return the rows of a pass."""
        classes = self._targets.classes(seen.model) if self._targets.is_identity else ()
        values = self._targets.values(seen, classes)
        if values.is_floating_point() and not isinstance(self.target, (str, tuple)):
            check_finite(values, f"target {describe_setting(self.target)!r}", seen.first)
        d_target = len(classes) or values.shape[-1]
        # a sketch keeps second moments, and makes the cost of targets that of its own width
        if self.sketch:
            matrix = sketch_matrix(d_target, self.sketch, self.seed, values.device)
            values = (values.double() @ matrix).to(torch.promote_types(values.dtype, torch.float32))
        n_source = values.shape[1]
        maker = RowMaker(self.ranks, self.source, self.without, self._controls, self.seed)
        # a shuffled control takes the keys of the sequence before, which may be in the batch before
        before: Sequence[Tensor | None] = self.last or [None] * seen.n_layers
        layers = move_valid(
            [maker.layer(seen, layer, n_source, last) for layer, last in enumerate(before)]
        )
        n_pos = position_count(seen.model, n_source)
        # tokens that no head passes on are no targets
        real = seen.is_real(n_source) & ~seen.places(self.without, n_pos)[:, :n_source]
        n_blocks = self._n_blocks(layers, len(classes) or values.shape[-1])
        parts = parts_of(values, seen, n_blocks)
        statistics = []
        for layer in layers:
            rows, order = rows_of(layer, parts)
            # with a set of features for each head, a set has the groups of that head alone
            sizes = {
                "n_groups": layer.n_heads // len(rows) * len(self.ranks),
                "capacity": self.buffer_rows,
                "n_blocks": n_blocks,
                "n_classes": len(classes),
            }
            statistics.append([Maps.read_pass(some, order, **sizes) for some in rows])
        return {
            "statistics": statistics,
            "left_out": torch.tensor([int((~each.valid & real).sum()) for each in layers]),
            "last": [layer.keys[-1].clone() for layer in layers],
            "n_heads": [layer.n_heads for layer in layers],
            "d_target": d_target,
        }

    def _n_blocks(self, layers: Sequence[LayerRows], n_targets: int) -> int:
        """Choose into how many blocks held-out sequences are dealt."""
        sizes = [
            (features.shape[-1], chosen.shape[-1])
            for layer in layers
            for features, chosen in zip(layer.features, layer.chosen, strict=True)
        ]
        of_a_block = sum(8 * d * (d + n_groups * n_targets) for d, n_groups in sizes)
        return self.blocks or (_BLOCKS if _BLOCKS * of_a_block <= _BLOCK_BYTES else 1)

    def settle(self) -> None:
        """Add the rows that wait."""
        for sets in self.statistics or ():
            for maps in sets:
                for buffer in maps.buffers():
                    buffer.settle(everything=True)

    def compute(self) -> RecoveryResult:
        """Fit the maps and measure their errors."""
        self.settle()
        notes, left_out = list(self.notes()), self.left_out.tolist()
        # of lists by name; some have no entry where a setting is off
        columns: dict[str, list[Any]] = defaultdict(list, weight=[], bias=[], ridge=[])
        lacking = []  # layers with too few rows, which is no property of the model
        for layer, sets in enumerate(self.statistics):
            fitted, evaluated = sets[0].fit.n, sum(block.n for block in sets[0].blocks)
            if not fitted or not evaluated:
                raise NothingMeasuredError(
                    f"layer {layer} has {fitted} rows to fit on and {evaluated} held out "
                    f"(of {self.n_sequences} sequences): expected both; run more sequences, a "
                    "smaller eval_every, or lower ranks"
                )
            # left out of both fits and errors
            if left_out[layer]:
                notes.append(
                    f"layer {layer}: {left_out[layer]} rows left out, where a requested rank "
                    "of some head is undefined or falls on a position that is no token"
                )
            n_main = len(self.ranks) * self.n_heads[layer] // len(sets)
            measured = [
                measure_maps(maps, self.ridge, self.d_target, n_main, self.maps) for maps in sets
            ]
            n_features = sets[0].fit.statistics.n_features
            # the least of all sets of features decides what is said of the layer
            rank = min(m.gram_rank for m in measured)
            if rank < n_features and self.ridge is None:
                note = (
                    f"layer {layer}: rank-deficient fit, rank {rank} of "
                    f"{n_features} features from {fitted} rows; the map of least norm "
                    "was taken"
                )
                notes.append(note)
                # fewer rows than features: more data would help
                if fitted <= n_features:
                    lacking.append(note)
            columns["n_fit"].append(fitted)
            columns["n_eval"].append(evaluated)
            columns["gram_rank"].append(rank)
            columns["n_features"].append(n_features)
            self._append_columns(columns, measured, (self.n_heads[layer], len(self.ranks)))
        if lacking:
            others = f" (the same in {len(lacking)} layers)" if len(lacking) > 1 else ""
            warnings.warn(lacking[0] + others, InfoFlowWarning, stacklevel=3)
        notes += self._notes_of_settings()
        found = {name: tuple(layers) for name, layers in columns.items()}
        return self.make_result(RecoveryResult, **found, notes=tuple(notes))

    def _append_columns(
        self, columns: dict[str, list[Any]], measured: list[Measured], shape: tuple[int, int]
    ) -> None:
        """Add a layer, [head, rank] everywhere."""
        n_main = shape[0] * shape[1] // len(measured)

        def whole(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts).view(*shape, *parts[0].shape[1:])

        for name in ("second_moment", "fvu"):
            ratios: list[Ratio] = [getattr(m, name) for m in measured]
            value = whole([ratio.value[:n_main] for ratio in ratios])
            columns[name].append(value)
            if len(self.statistics[0][0].blocks) > 1:
                half_width = whole([ratio.half_width[:n_main] for ratio in ratios])
                columns[f"{name}_low"].append((value - half_width).clamp(min=0))
                columns[f"{name}_high"].append(value + half_width)
            if self.sketch:
                parts = [ratio.sketch_error[:n_main] for ratio in ratios]
                columns[f"{name}_sketch_error"].append(whole(parts))
            first, controls = n_main, []
            for control in self._controls:
                # controls stand behind the heads: as many of "shuffled", one of each other
                size = n_main if control == "shuffled" else 1
                some = [ratio.value[first : first + size].expand(n_main) for ratio in ratios]
                controls.append(whole(some))
                first += size
            if controls:
                columns[f"control_{name}"].append(torch.stack(controls))
        if self.ridge is not None:
            columns["ridge"].append(whole([m.ridge[:n_main] for m in measured]))
        if self.maps:
            columns["weight"].append(whole([m.weight for m in measured]))
            columns["bias"].append(whole([m.bias for m in measured]))
        if self.statistics[0][0].fit.n_classes:
            columns["accuracy"].append(whole([m.accuracy for m in measured]))

    def _notes_of_settings(self) -> list[str]:
        notes = []
        if self.sketch:
            notes.append(
                f"targets were looked at in {self.sketch} random directions of {self.d_target}; "
                "the standard errors that this adds are second_moment_sketch_error and "
                "fvu_sketch_error"
            )
        if self.statistics[0][0].fit.n_classes:
            rows = min(ACCURACY_ROWS, sum(len(x) for x, _ in self.statistics[0][0].shown))
            notes.append(f"accuracy is measured on the first {rows} held-out rows of a layer")
        if len(self.statistics[0][0].blocks) == 1 and self.blocks is None:
            notes.append(
                "no intervals: statistics by blocks of sequences would take more than "
                f"{_BLOCK_BYTES // 2**20} MiB; ask for them by blocks={_BLOCKS}"
            )
        return notes

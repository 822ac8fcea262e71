"""How well the attended token can be read off the state: linear recovery maps (eq 56)."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError, InfoFlowWarning, NothingMeasuredError
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
from infoflow_lens.hooks.recovery.result import RecoveryResult
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
from infoflow_lens.hooks.states import combined, latest, summed

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
        self._described = describe_setting(self.target)

    def config(self) -> Mapping[str, Any]:
        """Return the settings, as JSON-compatible values."""
        return {**super().config(), "target": self._described}

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
        """Scores to rank, the states that are read, and what targets are made of."""
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
            check_finite(values, f"target {self._described!r}", seen.first)
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
            n_groups = layer.n_heads // len(rows) * len(self.ranks)
            statistics.append(
                [
                    Maps.read_pass(
                        some, order, n_groups,
                        capacity=self.buffer_rows, n_blocks=n_blocks, n_classes=len(classes),
                    )
                    for some in rows
                ]
            )  # fmt: skip
        return {
            "statistics": statistics,
            "left_out": torch.tensor([int((~each.valid & real).sum()) for each in layers]),
            "last": [layer.keys[-1].clone() for layer in layers],
            "n_heads": [layer.n_heads for layer in layers],
            "d_target": d_target,
        }

    def _n_blocks(self, layers: Sequence[LayerRows], n_targets: int) -> int:
        """Into how many blocks held-out sequences are dealt."""
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
            others = f" (so in {len(lacking)} layers)" if len(lacking) > 1 else ""
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
                "the standard errors of this stand in second_moment_sketch_error and "
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

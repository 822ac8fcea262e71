"""Influence by resample ablation: how far a state moves when a token is replaced by another's."""

from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.foundation.settings import Share
from infoflow_lens.hooks.influence.base import (
    AskedStates,
    MeasuredInfluence,
    Rerun,
    StateInfluence,
    enters_again,
    find_precision,
    rows_at_once,
    start_point,
)
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import check_inputs
from infoflow_lens.hooks.passes.view import Needs

_DONORS = 8
_ROUNDING = 8.0  # times the precision of the dtype: smaller changes are rounding [chosen]


class ResampleInfluence(StateInfluence):
    """Influence [layer, batch, pos, source]: how far a state moves when a token is replaced.

    The token of one position is replaced by that of a donor sequence at the same position, for all
    donors, and the norm of the change of every state is put together over donors. The state is the
    post-attention or the outgoing residual stream of each layer; the source is the input vector or,
    for models over token ids, the embedding (with its position), and with `source_layer`, what
    enters that layer. Unlike a derivative it sees what attention would do with another token.

    A donor's token may itself draw attention, for instance become the largest where the original
    token did not matter; then every source seems to have influence. The median over donors, a low
    quantile, or the donors' mean token leave that out; the mean over donors does not, and gets
    worse with more donors.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        donors: other inputs, at least as long, [donor, pos, d_token] or token ids [donor, pos]; the
            same for every sequence, so that batches do not change the result. What stands beside
            the ids of a sequence, such as ``token_type_ids``, stands beside those of its donors.
        aggregate: over donors: "median", "mean", or a quantile from 0 to 1.
        state: "post_attention" (x'_l of eq 1) or "resid_post".
        source_layer: None for the tokens; l for ``resid_pre`` of layer l, and then layers from l.
        chunk_size: sequences with a replaced token in a pass; default, by the size of the model.
        through_hooks: run through hooks of yours.
        layers: whose states; default all that the sources reach.
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.
        replacement: "each" donor in turn, or their "mean" token at each position, once.

    Raises:
        InfoFlowError: for no donors, donors of another shape, an unknown aggregate, state or layer,
            or a model whose forward pass cannot be repeated from its hooks.
    """

    donors: Shaped[Tensor, "donor pos *token"]
    aggregate: Literal["median", "mean"] | Share = "median"
    _: KW_ONLY
    replacement: Literal["each", "mean"] = "each"
    rounding: ClassVar[float] = _ROUNDING
    floor_of: ClassVar[str] = "a change of a state below {} of its size"

    _donated: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        donors = self.donors
        if not isinstance(donors, Tensor) or donors.ndim < 2 or len(donors) == 0:
            shape = tuple(donors.shape) if isinstance(donors, Tensor) else type(donors).__name__
            raise InfoFlowError(
                f"donors is {shape}: expected at least one sequence, [donor, pos, d_token] or "
                "token ids [donor, pos]"
            )

    def config(self) -> Mapping[str, Any]:
        """Return the settings, as JSON-compatible values; of donors their number and a digest."""
        digest = fingerprint({"donors": self.donors})
        return {**super().config(), "n_donors": len(self.donors), "donors": digest}

    def needs(self, model: nn.Module) -> Needs:
        """Name what every influence needs; the donors must be inputs of the model, too."""
        check_inputs(model, self.donors, "donors")
        return super().needs(model)

    def prepare(self, model: nn.Module, fingerprint: str | None = None) -> Needs:
        """Get ready; what the donors have in another model is forgotten."""
        self._donated = None
        return super().prepare(model, fingerprint)

    def _donation(
        self, model: nn.Module, start: Float[Tensor, "batch position d_source"], batch: Batch | None
    ) -> Float[Tensor, "any donor position d_source"]:
        """Return what the donors have in the place of the sources: one for all, or for each.

        Raises:
            InfoFlowError: for donors that are shorter, and for padded sequences whose positions
                are others than they have alone.
        """
        n_source, donated = start.shape[1], self._donated
        point = start_point(model, self.source_layer)
        # donors run alone: their tokens stand where those of the sequences do only if these give
        # the same alone
        padded = None if batch is None or batch.lengths is None else batch
        if padded is not None and not enters_again(model, padded, point, start):
            raise InfoFlowError(
                f"what enters at {point} in this call is not what the sequences have without their "
                "padding, such as where padding on the left counts in positions: donors would "
                "stand at other positions; expected position_ids that count tokens alone, "
                "mask.cumsum(1) - 1, or padding on the right"
            )
        if batch is not None and batch.columns:
            # what stands beside a token, such as its type, belongs to its place, not to the donor
            n = min(n_source, self.donors.shape[1])
            each = [batch.take(slice(i, i + 1)).cut(n).columns for i in range(len(batch))]
            donated = torch.stack([self._run_donors(model, n, columns) for columns in each])
        elif donated is None:
            donated = self._run_donors(model, self.donors.shape[1], {})[None]
            # hooks of the user may differ from pass to pass
            self._donated = None if self.through_hooks else donated
        if donated.shape[2] < n_source or donated.shape[3:] != start.shape[2:]:
            raise InfoFlowError(
                f"donors have {donated.shape[2]} positions, the sequences {n_source}: expected "
                "donors that are at least as long"
            )
        return donated[:, :, :n_source]

    def _run_donors(
        self, model: nn.Module, n_pos: int, columns: Mapping[str, Tensor]
    ) -> Float[Tensor, "donor position d_source"]:
        """Return what the first tokens of the donors are where the sources enter."""
        name, n = start_point(model, self.source_layer), len(self.donors)
        beside = {key: column.expand(n, *column.shape[1:]) for key, column in columns.items()}
        donated = call(model, Batch(self.donors[:, :n_pos], None, beside), [name]).activations[name]
        if self.replacement == "mean":
            donated = donated.float().mean(dim=0, keepdim=True).to(donated.dtype)
        return donated

    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        start, expected, place = states
        # all sources take from the same passes of the donors
        donated = self._donation(rerun.model, start, rerun.batch)
        plain = rerun(start)
        self._check_rerun(rerun, plain, expected)
        n_layers, (batch, n_pos, d_model) = len(plain), plain[0].shape
        n_source, n_donors = start.shape[1], donated.shape[1]
        influence = torch.zeros(n_layers, batch, place.shape[1], n_source, dtype=torch.float32)
        rows = self.chunk_size or rows_at_once(rerun.model, n_pos, d_model, start.device)
        # below this, a difference is what two passes of one input may have, too
        rounding = [
            _ROUNDING * torch.finfo(find_precision(state)).eps * state.float().norm(dim=-1)
            for state in plain
        ]
        self._expect(n_source * n_donors * batch)
        asked = place.clamp(min=0)
        # each source is a pass for each donor and sequence; as many together as memory holds
        together = max(1, rows // (n_donors * batch))  # sources
        for sources in torch.arange(n_source).split(together):
            each = torch.cartesian_prod(sources, torch.arange(n_donors), torch.arange(batch))
            moved = torch.empty(n_layers, len(each), place.shape[1], dtype=torch.float32)
            for part in torch.arange(len(each)).split(rows):
                source, donor, which = (index.to(start.device) for index in each[part].unbind(1))
                changed = start[which]
                row = torch.arange(len(part), device=start.device)
                changed[row, source] = donated[which % len(donated), donor, source]
                for layer, value in enumerate(rerun(changed, which)):
                    at = which.to(value.device)
                    gap = (value - plain[layer][at]).float().norm(dim=-1)
                    gap = gap.masked_fill(gap <= rounding[layer][at], 0).cpu()
                    moved[layer, part] = gap.gather(1, asked[each[part, 2]])
                self._work_done(len(part))
            moved = moved.view(n_layers, len(sources), n_donors, batch, -1)
            # from [layer, source, sequence, asked], with the sources last
            influence[..., sources] = self._aggregate(moved).permute(0, 2, 3, 1)
        return influence, {}

    def _aggregate(
        self, moved: Float[Tensor, "layer source donor sequence asked"]
    ) -> Float[Tensor, "layer source sequence asked"]:
        """Aggregate over donors; torch.quantile takes no large tensors."""
        if self.aggregate == "mean":
            return moved.mean(dim=2)
        quantile = 0.5 if self.aggregate == "median" else float(self.aggregate)
        ranked = moved.sort(dim=2).values
        at = quantile * (moved.shape[2] - 1)
        low = int(at)
        high = min(low + 1, moved.shape[2] - 1)
        return ranked[:, :, low].lerp(ranked[:, :, high], at - low)


def donors_from(
    batches: Batches, n_measured: int, length: int
) -> Shaped[Tensor, "donor pos *token"]:
    """Return tokens that take the place of others: of sequences that are not measured, if possible.

    Where sequences differ in length, a donor's later tokens come from other sequences than its
    first: what enters at a position is its token alone.

    Args:
        batches: sequences, the first of which are measured.
        n_measured: how many are.
        length: tokens of the longest that is measured.

    Raises:
        InfoFlowError: if some position has no other sequence's token.
    """
    # the last tokens of other sequences at each position, and of all, as few have others
    others: list[deque[Tensor]] = [deque(maxlen=_DONORS) for _ in range(length)]
    every: list[deque[Tensor]] = [deque(maxlen=_DONORS) for _ in range(length)]
    for index, row in enumerate(batches.rows):
        for position, token in enumerate(row[:length]):
            every[position].append(token)
            if index >= n_measured:
                others[position].append(token)
    donors = []
    for position in range(length):
        found = others[position] if len(others[position]) >= 2 else every[position]
        if len(found) < 2:
            raise InfoFlowError(
                "influence 'resample' replaces tokens by those of other sequences, and only one "
                f"has a token {position}: expected at least 2; give more sequences, cut them with "
                "max_length, or choose influence 'estimate'"
            )
        # fewer than asked for are used again, so that all positions have as many
        donors.append(torch.stack([found[i % len(found)] for i in range(_DONORS)]))
    return torch.stack(donors, dim=1)

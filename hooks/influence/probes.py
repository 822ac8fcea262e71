"""Influence by derivatives, exact or estimated by random directions; and by other tokens."""

from collections import deque
from collections.abc import Mapping
from dataclasses import KW_ONLY, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.record import fingerprint
from infoflow_lens.foundation.settings import Remedy, Seed, Share
from infoflow_lens.hooks.influence.base import (
    AskedStates,
    MeasuredInfluence,
    Rerun,
    StateInfluence,
    StateName,
    enters_again,
    find_precision,
    rows_at_once,
    start_point,
    take_places,
)
from infoflow_lens.hooks.influence.derivatives import DisturbedError, forward_derivatives
from infoflow_lens.hooks.model.call import call
from infoflow_lens.hooks.model.inputs import Batch, Batches
from infoflow_lens.hooks.model.points import check_inputs
from infoflow_lens.hooks.passes.view import Needs
from infoflow_lens.hooks.states import combined, concatenated, either, summed

Directions = Annotated[int, Ge(2), Remedy("whose spread tells the error; or None for exact norms")]
_DIRECTIONS_AT_ONCE = 16  # if memory is short, reduce the sequences in a pass down to this
# of Student's t, for a bound that holds in 95% of draws: where a state moves in few directions,
# draws that miss them have a small spread, too, and .975 would cover 88% [chosen]
_QUANTILE = 0.995


class JacobianInfluence(StateInfluence):
    """Influence [layer, batch, pos, source]: the Frobenius norm of d state / d token.

    The state is the post-attention or the outgoing residual stream of each layer; the source is the
    input vector or, for models over token ids, what enters the first layer (the token's embedding
    with its position, behind the norm that some models put there), and with `source_layer`, what
    enters that layer at each position.

    Exact by default: by forward-mode differentiation in every input direction or, where this takes
    fewer passes (few `positions`) or the model has no forward mode, by reverse mode in every
    direction of the asked states.

    With `estimate` = m: by reverse mode in m random orthogonal directions of each asked state,
    ``|J|^2 ~ mean_i d |J^T u_i|^2``. The relative standard error of one norm is at most
    ``sqrt((1 - m / d_model) / (2 m))``, for a Jacobian of rank one, and smaller the more of the
    state a source moves; ``result.relative_error`` is what was seen. Directions depend on the seed,
    the layer and the position only.

    Its passes are its own; see :class:`StateInfluence`.

    Args:
        state: "post_attention" (x'_l of eq 1) or "resid_post".
        source_layer: None for the tokens; l for ``resid_pre`` of layer l, and then layers from l.
        layers: whose states; default all that the sources reach.
        positions: whose states; default all. Negative ones count from the end of each sequence, so
            (-1,) is the last token, or CLS.
        estimate: random directions for each state, at least 2; None for exact norms.
        seed: of the random directions.
        chunk_size: directions per pass; default, by the sizes of the model and the batch.
        through_hooks: differentiate through hooks of yours. They then fire in every pass of the
            probe's, on tensors of torch.func.

    Raises:
        InfoFlowError: for settings that make no sense, an unknown state, layer or position, a
            model whose forward pass cannot be repeated from its hooks, or one of which a part has
            no derivatives.
    """

    differentiates: ClassVar[bool] = True

    state: StateName = "post_attention"
    _: KW_ONLY
    estimate: Directions | None = None
    seed: Seed = 0

    errors = summed()  # [layer, 2], squared errors and energies of an estimate
    lacks_forward_mode = combined(either)

    def _measure(self, rerun: Rerun, states: AskedStates) -> MeasuredInfluence:
        start, expected, place = states
        batch, n_source, d_source = start.shape
        n_pos, d_model = expected[0].shape[1:]
        rows = rows_at_once(rerun.model, n_pos, d_model, start.device)
        # forward mode takes a pass for each number that enters, reverse mode one for each that is
        # read
        by_forward = n_source * d_source <= len(expected) * place.shape[1] * d_model
        together = max(1, min(batch, rows // _DIRECTIONS_AT_ONCE))
        if self.chunk_size is not None:
            together = batch
        errors = torch.zeros(len(expected), 2, dtype=torch.float64)
        # once it is missing, every other group is measured by reverse mode, too
        lacking, parts = self.lacks_forward_mode or "", []
        groups = -(-batch // together)
        for first in range(0, batch, together):
            some = torch.arange(first, min(first + together, batch))
            chunk = self.chunk_size or max(1, rows // len(some))
            here, of_some = rerun.take(some), states.take(some)
            energy = None
            if self.estimate is None and by_forward and not lacking:
                each = n_source * d_source
                self._expect(groups * each, first // together * each)
                try:
                    energy = self._forward(here, of_some, chunk)
                except _NoForwardModeError as error:
                    lacking = str(error)
            # an estimate, or a model without forward mode
            if energy is None:
                m = d_model if self.estimate is None else min(self.estimate, d_model)
                # a backward pass runs through the layer of the state and those below it
                each = sum(layer + 1 for layer in rerun.layers) * m * place.shape[1]
                self._expect(groups * each, first // together * each)
                energy = self._reverse(here, of_some, chunk, errors)
            parts.append(energy)
        more = {"errors": errors, "lacks_forward_mode": lacking}
        return torch.cat(parts, dim=1).sqrt().float(), more

    def _forward(
        self, rerun: Rerun, states: AskedStates, chunk: int
    ) -> Float[Tensor, "layer batch asked source"]:
        """Find squared norms by all input directions."""
        start, expected, place = states
        batch, n_source, d_source = start.shape
        n = n_source * d_source
        chunk = -(-n // -(-n // chunk))  # of equal sizes
        squares = [
            torch.zeros(batch, state.shape[1], n_source, dtype=_sums(state), device=state.device)
            for state in expected
        ]

        def towards(direction: Tensor) -> Tensor:
            return direction.view(1, n_source, d_source).expand_as(start)

        for column in range(0, n, chunk):
            index = torch.arange(column, min(column + chunk, n), device=start.device)
            directions = torch.zeros(len(index), n, dtype=start.dtype, device=start.device)
            directions[torch.arange(len(index)), index] = 1
            try:
                values, tangents = forward_derivatives(rerun, start, towards, directions)
            except torch.OutOfMemoryError:
                raise
            except DisturbedError as error:
                raise _NoForwardModeError from error
            except RuntimeError as error:  # also NotImplementedError
                if column or "memory" in str(error):
                    raise
                raise _NoForwardModeError(str(error).splitlines()[0][:120]) from error
            if column == 0:
                self._check_rerun(rerun, values, expected)
            for total, tangent in zip(squares, tangents, strict=True):
                # [direction, batch, pos, d_model]
                energy = _energy(tangent, total.dtype).permute(1, 2, 0)
                # a direction is one number of one source, to which its energy is added
                total.index_add_(2, (index // d_source).to(total.device), energy)
            self._work_done(len(index))
        return torch.stack([take_places(total, place).cpu() for total in squares])

    def _reverse(
        self, rerun: Rerun, states: AskedStates, chunk: int, errors: Tensor
    ) -> Float[Tensor, "layer batch asked source"]:
        """Find squared norms by directions of the asked states, all of them or random ones."""
        start = states.start.detach().requires_grad_()
        batch, n_source, _ = start.shape
        n_asked, d_model = states.place.shape[1], states.expected[0].shape[2]
        with torch.enable_grad():
            values = rerun(start)
        self._check_rerun(rerun, [value.detach() for value in values], states.expected)
        m = d_model if self.estimate is None else min(self.estimate, d_model)
        squares = torch.zeros(len(values), batch, n_asked, n_source, dtype=torch.float64)
        for i, (layer, value) in enumerate(zip(rerun.layers, values, strict=True)):
            for rows in torch.arange(n_asked).split(max(1, chunk // m)):
                place = states.place[:, rows]
                energies = torch.empty(len(rows) * m, batch, n_source, dtype=torch.float32)
                drawn, index = self._draw_directions(layer, place, d_model, m)
                for pairs in torch.arange(len(energies)).split(chunk):
                    towards = _towards(value, place, pairs // m, pairs % m, drawn, index)
                    (found,) = torch.autograd.grad(
                        value, start, towards, retain_graph=True, is_grads_batched=True
                    )
                    # [pair, batch, source]
                    energies[pairs] = _energy(found, torch.float32).cpu()
                    self._work_done(len(pairs) * (layer + 1))
                energy = energies.view(len(rows), m, batch, n_source).transpose(0, 2).double()
                squares[i, :, rows] = energy.sum(dim=1)
                if self.estimate is None:
                    continue
                energy = energy * d_model  # each of them estimates the squared norm
                squares[i, :, rows] = mean = energy.mean(dim=1)
                # orthogonal directions are a sample without replacement: all d of them are exact
                variance = energy.var(dim=1) / m * (1 - m / d_model)
                known = (mean > 0) & (place >= 0)[:, :, None]
                errors[i, 0] += (variance[known] / (4 * mean[known])).sum()  # of the root
                errors[i, 1] += mean[known].sum()
        return squares

    def _draw_directions(
        self, layer: int, place: Int[Tensor, "batch row"], d_model: int, m: int
    ) -> tuple[Float[Tensor, "position direction d_model"] | None, Int[Tensor, "batch row"]]:
        """Draw directions for each position that occurs, and say which are whose; None for all."""
        different, index = place.clamp(min=0).unique(return_inverse=True)
        if self.estimate is None or m == d_model:
            return None, index
        drawn = [_orthogonal(self.seed, layer, int(position), m, d_model) for position in different]
        return torch.stack(drawn), index

    def _relative_error(self) -> tuple[float, ...] | None:
        """Read the relative error of each layer off the spread over the directions."""
        if self.estimate is None:
            return None
        from scipy.special import stdtrit

        error, energy = self.errors.unbind(dim=1)
        standard = (error / energy.clamp(min=1e-300)).sqrt()
        # all sources and sequences share the directions of a position
        positions = self.places.unique()
        freedom = (self.estimate - 1) * max(1, int((positions >= 0).sum()))
        return tuple((float(stdtrit(freedom, _QUANTILE)) * standard).tolist())

    def more_fields(self) -> Mapping[str, Any]:
        """Return the error of an estimate."""
        return {"relative_error": self._relative_error()}

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the result must know."""
        notes = super().notes()
        if self.lacks_forward_mode:
            notes += (
                "exact by reverse mode, slowly: the model has no forward mode "
                f"({self.lacks_forward_mode})",
            )
        if self.estimate is not None and self.errors is not None:
            found = max(self._relative_error() or (0.0,))
            single = (1 / (2 * self.estimate)) ** 0.5
            notes += (
                f"influence is estimated by {self.estimate} random directions for each state: by "
                f"their spread its relative error is below {found:.1%} in the worst layer (95%); "
                f"the standard error of a single norm is at most {single:.0%}",
            )
        return notes


class _NoForwardModeError(Exception):
    """The model has no forward-mode derivatives, for this reason; none where it may have them."""


def _sums(state: Tensor) -> torch.dtype:
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def _energy(vectors: Float[Tensor, "*shape d"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Find squared norms of the last axis."""
    return vectors.to(dtype).square().sum(dim=-1)


def _towards(
    value: Float[Tensor, "batch pos d_model"],
    place: Int[Tensor, "batch row"],
    row: Int[Tensor, " pair"],
    direction: Int[Tensor, " pair"],
    drawn: Float[Tensor, "position direction d_model"] | None,
    index: Int[Tensor, "batch row"],
) -> Float[Tensor, "pair batch pos d_model"]:
    """Put, for each (row, direction), that direction at that state of every sequence, else 0."""
    towards = torch.zeros(len(row), *value.shape, dtype=value.dtype, device=value.device)
    pair = torch.arange(len(row), device=value.device)[:, None]
    sequence = torch.arange(len(value), device=value.device)
    position = place[:, row].T.clamp(min=0).to(value.device)  # [pair, sequence]
    if drawn is None:
        towards[pair, sequence, position, direction.to(value.device)[:, None]] = 1
    else:
        towards[pair, sequence, position] = drawn[index[:, row].T, direction[:, None]].to(towards)
    return towards


def _orthogonal(
    seed: int, layer: int, position: int, m: int, d_model: int
) -> Float[Tensor, "direction d_model"]:
    """Draw orthonormal directions, the same for every sequence and batch."""
    key = (seed * 1_000_003 + layer) * 1_000_003 + position
    generator = torch.Generator().manual_seed(key % 2**63)
    columns = torch.randn(d_model, m, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(columns).Q.T.float()


_DONORS = 8
_ROUNDING = 8.0  # times the precision of the dtype: smaller changes are rounding [chosen]


class ResampleInfluence(StateInfluence):
    """Influence [layer, batch, pos, source]: how far a state moves when a token is replaced.

    The token of one position is replaced by that of a donor sequence at the same position, for all
    donors, and the norm of the change of every state is put together over the donors that have
    another token there; where none has, nothing is replaced, and it is 0. The state is the
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

    unmoved = concatenated(1, fill=False)  # [sequence, source], tokens that no donor replaces

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
        # a donor with the token that stands there replaces nothing; [source, donor, sequence, 1]
        replaces = (donated != start[:, None]).any(dim=-1).permute(2, 1, 0)[..., None].cpu()
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
            moved = moved.masked_fill(~replaces[sources], torch.nan)
            # from [layer, source, sequence, asked], with the sources last
            influence[..., sources] = self._aggregate(moved).permute(0, 2, 3, 1)
        return influence, {"unmoved": ~replaces.any(dim=1)[..., 0].T}

    def notes(self) -> tuple[str, ...]:
        """Say at which tokens nothing was replaced."""
        notes = super().notes()
        if self.unmoved is None:
            return notes
        sources = torch.arange(self.unmoved.shape[1])
        places = (self.unmoved & (sources < self.lengths[:, None])).nonzero().tolist()
        if not places:
            return notes
        where = ", ".join(str(place) for _, place in places[:8]) + ", ..." * (len(places) > 8)
        if self.n_sequences > 1:
            where = f"{len(places)} places of {len({row for row, _ in places})} sequences"
        return (
            *notes,
            f"all donors have the sequence's own token at {'position ' * (self.n_sequences == 1)}"
            f"{where}: replaced by itself, it moves nothing, so that its influence is 0 whatever "
            "the model does",
        )

    def _aggregate(
        self, moved: Float[Tensor, "layer source donor sequence asked"]
    ) -> Float[Tensor, "layer source sequence asked"]:
        """Aggregate over donors but NaN, 0 for none; torch.quantile takes no large tensors."""
        if self.aggregate == "mean":
            return moved.nanmean(dim=2).nan_to_num(0)
        quantile = 0.5 if self.aggregate == "median" else float(self.aggregate)
        ranked, last = moved.sort(dim=2).values, (~moved.isnan()).sum(dim=2, keepdim=True) - 1
        at = quantile * last.clamp(min=0)
        low = at.long()
        below = ranked.gather(2, low)
        above = ranked.gather(2, torch.minimum(low + 1, last.clamp(min=0)))
        return torch.lerp(below, above, (at - low).to(moved)).squeeze(2).nan_to_num(0)


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

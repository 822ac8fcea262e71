"""Influence by derivatives: exact Jacobian norms, and an estimate of them by random directions."""

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Float, Int
from torch import Tensor

from infoflow_lens.foundation.settings import Remedy, Seed
from infoflow_lens.hooks.influence.base import (
    AskedStates,
    MeasuredInfluence,
    Rerun,
    StateInfluence,
    StateName,
    rows_at_once,
    take_places,
)
from infoflow_lens.hooks.influence.derivatives import DisturbedError, forward_derivatives
from infoflow_lens.hooks.states import combined, either, summed

Directions = Annotated[int, Ge(2), Remedy("whose spread tells the error; or None for exact norms")]
_DIRECTIONS_AT_ONCE = 16  # if memory is short, reduce the sequences in a pass down to this


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
        return tuple((float(stdtrit(freedom, 0.975)) * standard).tolist())

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

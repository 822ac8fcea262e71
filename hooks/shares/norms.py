"""Norms whose statistics are held, so that what is read of a state is the sum of what wrote it.

A norm divides by a number that depends on the whole state. Held at its value, the norm is linear,
and so is all between the residual stream and a score or a logit (Elhage et al. 2021).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infoflow_lens.foundation.errors import InfoFlowError

_ROOTS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_"}
_LENGTHS = {"norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "std", "var"}
_POWERS = {"pow", "pow_", "__pow__"}
_PAIRS = {"var_mean", "std_mean"}  # of which the mean is linear


class HeldNorms(TorchFunctionMode):
    """Take the statistics of norms for constants while the block runs.

    Statistics are what roots, lengths and spreads give, wherever a model computes them; fused norms
    are computed in the open.

    Args:
        statistics: those of an earlier pass of the same model, in order, which take the place of
            this pass's own.

    Attributes:
        statistics: of this pass, in order.
    """

    def __init__(self, statistics: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.statistics: list[Tensor] = []
        self._given = statistics

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("layer_norm", "rms_norm"):
            return self._normalise(name == "layer_norm", *args, **kwargs)
        if name == "group_norm":
            raise InfoFlowError(
                "the model has a group norm, whose statistics cannot be held: expected layer norms "
                "or RMS norms"
            )
        if name == "normalize":
            return self._divide_by_length(*args, **kwargs)
        out = func(*args, **kwargs)
        if name in _ROOTS or name in _LENGTHS or (name in _POWERS and _is_root(args, kwargs)):
            return self._hold(out)
        return (self._hold(out[0]), out[1]) if name in _PAIRS else out

    def _hold(self, statistic: Tensor) -> Tensor:
        held = statistic.detach()
        if self._given is not None:
            place = len(self.statistics)
            before = self._given[place] if place < len(self._given) else None
            if before is None or before.shape != held.shape:
                raise InfoFlowError(
                    "a second pass of the same model took other norms than the first: expected "
                    "the same operations in each pass; take off hooks that change it"
                )
            held = before
        self.statistics.append(held)
        return held

    def _normalise(
        self,
        is_centred: bool,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float | None = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        """Compute a layer norm or RMS norm in the open, in float32 or more, as fused ones do."""
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        axes = tuple(range(-len(normalized_shape), 0))
        eps = (1e-5 if is_centred else torch.finfo(input.dtype).eps) if eps is None else eps
        if is_centred:
            wide = wide - wide.mean(axes, keepdim=True)
        out = wide * self._hold(torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps))
        out = out if weight is None else out * weight
        return (out if bias is None else out + bias).to(input.dtype)

    def _divide_by_length(
        self, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None
    ) -> Tensor:
        length = torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)
        return input / self._hold(length)


def _is_root(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
    return exponent in (0.5, -0.5) if isinstance(exponent, (int, float)) else False

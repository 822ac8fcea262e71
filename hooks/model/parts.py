"""The parts of a model: its blocks with their attentions and states, its matrices and norms.

Matrices and norms are read by what they do, never by their class: so adapters count as they are,
merged, unmerged or switched off, and so do quantized weights and wrapped layers.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import part_in_eval_mode

_Norms = Literal["pre", "post", "both", "none"]
_BARS = {torch.float16: 1e-2, torch.bfloat16: 3e-2}  # some roundings of what a norm gives


@dataclass(frozen=True)
class Place:
    """Where a state is in a pass.

    Attributes:
        kind: the "output" or the "input" of a module, or the other operand of a "sum" with the
            state before.
        path: of the module.
        is_written: whether it is written in place later, so that who keeps it must copy it.
        number: of sums, which one.
    """

    kind: Literal["output", "input", "sum"]
    path: str = ""
    is_written: bool = False
    number: int = 0


@dataclass(frozen=True)
class Projection:
    """A module that is a linear map, of each position for itself.

    Attributes:
        path: of the module.
        d_in: the width of what it reads.
    """

    path: str
    d_in: int

    def weight(self, model: nn.Module) -> Float[Tensor, "d_in d_out"]:
        """Read the matrix."""
        module = model.get_submodule(self.path)
        if type(module) is nn.Linear and type(module.weight) is nn.Parameter:  # no packed numbers
            return module.weight.detach().T
        with part_in_eval_mode(module):
            zero = self._zero(module)
            # a unit vector gives a row of the matrix and the bias, zero the bias alone
            units = torch.eye(self.d_in).to(zero)
            return run_forward(module, units) - run_forward(module, zero)

    def bias(self, model: nn.Module) -> Float[Tensor, " d_out"]:
        """Read what it adds."""
        module = model.get_submodule(self.path)
        with part_in_eval_mode(module):
            return run_forward(module, self._zero(module))[0]

    def _zero(self, module: nn.Module) -> Float[Tensor, "1 d_in"]:
        like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
        return torch.zeros(1, self.d_in, device=like.device, dtype=like.dtype)


class NormNumbers(NamedTuple):
    """What a norm computes: ``weight * (x - mean) / scale + bias``.

    Attributes:
        weight: [d_model].
        bias: [d_model].
        centers: whether the mean is taken off.
    """

    weight: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    centers: bool

    def scale(
        self, x: Float[Tensor, "*batch d_model"], y: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch 1"]:
        """Read off what divided each position, where `x` became `y`."""
        # by sums over the width, as single entries of what is divided may be 0
        moved = self.apply(x, 1)
        return (moved * moved).sum(-1, True) / (moved * (y - self.bias)).sum(-1, True)

    def apply(self, x: Float[Tensor, "*batch d_model"], scale: Any) -> Float[Tensor, "..."]:
        """Norm `x` with a given scale, without the bias; linear in `x`."""
        return self.weight * (x - x.mean(-1, True) if self.centers else x) / scale


@dataclass(frozen=True)
class Norm:
    """A module that is a layer norm, or a root-mean-square norm, with a weight.

    Attributes:
        path: of the module.
        d_model: the width that it reads.
    """

    path: str
    d_model: int

    def numbers(self, model: nn.Module) -> NormNumbers:
        """Read its weight and bias, at least in float32, and whether it centers.

        Raises:
            InfoFlowError: if it computes something else by now.
        """
        module = model.get_submodule(self.path)
        like = next(iter(module.parameters()), next(model.parameters()))
        numbers = _numbers_of(module, torch.empty(self.d_model).to(like))
        if numbers is None:
            raise InfoFlowError(
                f"{self.path} ({type(module).__name__}) is no norm with a scale for each position: "
                "expected weight * (x - mean) / scale + bias; read what it gives"
            )
        return numbers


def _numbers_of(module: nn.Module, like: Float[Tensor, " d_model"]) -> NormNumbers | None:
    """Read a norm, in float32 or more, by what it makes of a few vectors; None if it is none."""
    place = torch.arange(len(like), dtype=torch.float64, device=like.device)
    probe = (1 + place / len(like)) * (-1) ** place * 1e2  # its eps is nothing beside that
    probe = (probe - probe.mean()).to(like.dtype)
    x = probe.roll(1) * (probe.abs() / 1e2)  # squares stay within float16
    with part_in_eval_mode(module):
        rows = torch.stack([probe, -probe, probe + 50, x])
        rows_out = run_forward(module, rows)
    # from here on at least in float32: squares of these numbers are more than float16 holds
    wide = torch.promote_types(like.dtype, torch.float32)
    probe, x, plus, minus, shifted, y = (t.to(wide) for t in (probe, x, *rows_out))
    size = probe.square().mean().sqrt()
    # a norm gives -x the same scale as x: half the sum is the bias, half the difference the rest
    weight, bias = (plus - minus) / 2 * size / probe, (plus + minus) / 2
    bar = _BARS.get(like.dtype, 1e-4)
    # a norm that takes the mean off gives the same when all entries are shifted
    shift = (shifted - plus).abs().max()
    numbers = NormNumbers(weight, bias, bool(shift <= bar * plus.abs().max()))
    # the numbers count only if they also give what the norm makes of another vector
    again = numbers.apply(x, numbers.scale(x, y)) + bias
    return numbers if torch.allclose(again, y, atol=bar * float(y.abs().max())) else None


@dataclass(frozen=True)
class Attention:
    """One attention of a block.

    Attributes:
        number: among the softmaxes and fused attentions of its block.
        how: a "softmax", or "fused".
        n_heads: heads of the pattern.
        n_kv_heads: heads of keys and values that differ.
        d_head: the width of z.
        sinks: columns of the softmax that belong to no key.
        product: the number of the product that makes its scores, -1 for fused attention; None where
            q and k cannot be edited in one place.
        is_rotated: whether q is another vector than a module gave: rotated, normed or scaled.
        is_causal: whether no query sees a later key.
        distance: of attention in the open from fused attention; None for a softmax.
        output: the matrix that reads z and nothing else, if one does.
    """

    number: int
    how: Literal["softmax", "fused"]
    n_heads: int
    n_kv_heads: int
    d_head: int
    sinks: int
    product: int | None
    is_rotated: bool
    is_causal: bool
    distance: float | None
    output: Projection | None


@dataclass
class Block:
    """One block, in the order of the pass.

    Attributes:
        path: of its module; blocks that share a module have the same.
        module: the module.
        axes: of batch, position and width in the stream; None where it has no states.
        attentions: in the order of the pass.
        n_attentions: softmaxes and fused attentions of the block, routers' among them.
        is_parallel: whether the MLP stands beside attention and reads what that reads.
        norms: where they stand: "pre", before a sublayer; "post", behind it; "both"; "none".
        attn_out, mid, mlp_out: where these states are; None with a sentence in `lacks`.
        extra_out: where a third sublayer adds to the stream behind the MLP; None where none does.
        neurons: where what the last matrix of the MLP reads is.
        mlp_output: that matrix.
        mixer: what runs in the place of attention.
        is_joined: whether what attention gives is added to what another mixer beside it gives,
            before both are added to the stream; `attn_out` is both.
        adds: whether what leaves is the sum of what enters, attn_out and mlp_out.
        lacks: by state, why it cannot be seen.
    """

    path: str
    module: nn.Module
    axes: tuple[int, int, int] | None
    attentions: tuple[Attention, ...] = ()
    n_attentions: int = 0
    is_parallel: bool = False
    norms: _Norms = "none"
    attn_out: Place | None = None
    mid: Place | None = None
    mlp_out: Place | None = None
    extra_out: Place | None = None
    neurons: Place | None = None
    mlp_output: Projection | None = None
    mixer: str | None = None
    is_joined: bool = False
    adds: bool = False
    lacks: dict[str, str] = field(default_factory=dict)


def run_forward(module: nn.Module, x: Float[Tensor, "n d_in"]) -> Float[Tensor, "n d_out"]:
    """Run a module on vectors, as one sequence, past the hooks that stand on it."""
    out: Tensor = module.forward(x[None])
    return out[0]


def is_linear(module: nn.Module, like: Tensor) -> bool:
    """Say whether a module with weights is, up to a constant, a linear map of each position."""
    if next(module.parameters(), None) is None:  # nothing to read: dropout, identity
        return False
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, like.shape[-1], generator=generator, dtype=torch.float32).to(like)
    try:
        out = run_forward(module, torch.stack([x, y, x + y, torch.zeros_like(x)]))
        alone = run_forward(module, y[None])[0]
    except Exception:  # of any kind: a module that takes something else
        return False
    if not isinstance(out, Tensor) or out.ndim != 2 or not out.is_floating_point():
        return False
    # f(x + y) + f(0) = f(x) + f(y), and one position must not change with the others
    f_x, f_y, f_sum, f_zero = out
    bar = 2e-2 if like.dtype in (torch.float16, torch.bfloat16) else 1e-4
    bar *= float(out.abs().max())
    return torch.allclose(f_sum + f_zero, f_x + f_y, atol=bar) and torch.allclose(
        alone, f_y, atol=bar
    )


def is_norm(module: nn.Module, like: Float[Tensor, "... d_model"]) -> bool:
    """Say whether what a module gives does not change when what it reads grows eightfold."""
    unit = like / like.abs().max()
    try:  # powers of two, by which nothing is rounded
        small, large = (module.forward(unit * size) for size in (32, 256))
    except Exception:  # as before
        return False
    if not isinstance(small, Tensor) or small.shape != like.shape:
        return False
    top = float(small.abs().max())
    return top > 0 and torch.allclose(small, large, rtol=1e-2, atol=1e-3 * min(top, 1))


def is_plain_norm(module: nn.Module, like: Float[Tensor, "... d_model"]) -> bool:
    """Say whether a module is a norm that :class:`Norm` can read."""
    return is_norm(module, like) and _numbers_of(module, like.flatten(0, -2)[0]) is not None

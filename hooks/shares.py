"""Splitting what is read of a model over what wrote the residual stream.

Embeddings, heads and MLPs are each a leaf of derivatives.

Each writer's output is cut off from what it was made of, so that the derivative of what is read
reaches it along the residual stream alone. Times what was written, it is the writer's exact share
of anything that is linear in the stream while the statistics of norms are held.

Norms have their statistics held, so that what is read of a state is the sum of what wrote it. A
norm divides by a number that depends on the whole state. Held at its value, it is linear, and so is
all between the residual stream and a score or a logit (Elhage et al. 2021). A gate by which a block
multiplies what its heads wrote (Qwen3-Next) is held, too: its share is that of the heads.
"""

import re
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from infoflow_lens.foundation.display import panel
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.lazy import pd
from infoflow_lens.foundation.modules import eval_mode
from infoflow_lens.foundation.record import RunRecord
from infoflow_lens.foundation.settings import checked
from infoflow_lens.hooks.model.call import HookFunction, NamedHook, call
from infoflow_lens.hooks.model.inputs import Inputs, read_one
from infoflow_lens.hooks.model.points import (
    check_one_device,
    hook_points,
    kind_of,
    layer_count,
    layer_of,
    takes_model,
)
from infoflow_lens.hooks.model.tap import MOVES
from infoflow_lens.hooks.model.texts import readable_tokens
from infoflow_lens.hooks.readouts import Readout, bind_readout
from infoflow_lens.hooks.result import LabelledArray, Result

_EMBEDDINGS = {"hook_embed": "token embedding", "hook_pos_embed": "positional embedding"}
_SUBLAYERS = {
    ".hook_mixer_out": "mixer", ".hook_mlp_out": "MLP", ".hook_extra_out": "third sublayer",
}  # fmt: skip
_HEADS = re.compile(r"blocks\.\d+\.(attn\w*)\.hook_z")
_CHUNK = 2**25  # numbers of derivatives that are held at once


@dataclass(frozen=True)
class _Leaf:
    """One hook point at which something is written.

    Attributes:
        value: what was written, [1, pos, d_model], or by head [1, pos, head, d_head].
        names: of the writers, one a head.
    """

    value: Tensor
    names: tuple[str, ...]


class Writers:
    """All that writes the residual stream of a model before a layer.

    Args:
        model: a model with TransformerLens's hook points.
        before: the layer; default, behind the last.

    Attributes:
        leaves: by hook point, what one pass wrote there.
    """

    def __init__(self, model: nn.Module, before: int | None = None) -> None:
        points = hook_points(model)
        self._model = model
        self._points = [name for name in _EMBEDDINGS if name in points]
        if not self._points:
            self._points = ["blocks.0.hook_resid_pre"]
        for layer in range(layer_count(model) if before is None else before):
            own = [name for name in points if layer_of(name) == layer]
            # heads are no writers where another mixer adds with them: the mixer's share holds both
            if f"blocks.{layer}.hook_mixer_out" not in own:
                self._points += [name for name in own if _HEADS.fullmatch(name)]
            self._points += [name for name in own if name.endswith(tuple(_SUBLAYERS))]
        self.leaves: dict[str, _Leaf] = {}

    @property
    def points(self) -> tuple[str, ...]:
        """The hook points at which something is written."""
        return tuple(self._points)

    def cut(self, held: "HeldNorms") -> Iterator[NamedHook]:
        """Make hooks that make each writer's output a leaf, and keep it.

        Args:
            held: what the pass runs in, which holds the gates of what heads write.
        """
        self.leaves.clear()
        for name in self._points:
            yield name, self._cutter(name, held)

    def silence(self) -> Iterator[NamedHook]:
        """Make hooks in whose pass nothing is written: biases alone make what is read then."""
        for name, leaf in self.leaves.items():
            # a rotary table is no writer, and stays, so that queries and keys are rotated as before
            if leaf.names:
                yield name, write_nothing

    def pin(self) -> Iterator[NamedHook]:
        """Make hooks in whose pass everything is written as in the pass that was cut."""
        for name, leaf in self.leaves.items():
            yield name, partial(_replace, leaf.value.detach())

    def _cutter(self, name: str, held: "HeldNorms") -> HookFunction:
        def hook_fn(activation: Tensor, hook: Any) -> Tensor | None:
            if _is_entrance(name) and self._is_table(activation):
                self.leaves[name] = _Leaf(activation, ())
                return None
            value = activation.detach().clone().requires_grad_()
            self.leaves[name] = _Leaf(value, self._names(name, value))
            copy = value.clone()  # which the model may write to in place
            if _HEADS.fullmatch(name):
                held.follow(copy)
            return copy

        return hook_fn

    def _is_table(self, activation: Tensor) -> bool:
        """Say whether a hook point of embeddings shows no part of the stream (rotary tables)."""
        others = (leaf.value.shape[-1] for leaf in self.leaves.values())
        return activation.ndim != 3 or any(width != activation.shape[-1] for width in others)

    def _names(self, point: str, value: Tensor) -> tuple[str, ...]:
        if point in _EMBEDDINGS:
            return (_EMBEDDINGS[point],)
        layer = layer_of(point)
        heads = _HEADS.fullmatch(point)
        if heads is None:
            kinds = (kind for end, kind in _SUBLAYERS.items() if point.endswith(end))
            return tuple(f"{kind} {layer}" for kind in kinds) or ("embedding",)
        n = value.shape[2] if value.ndim == 4 else self._head_count(layer or 0)
        kind = "head" if heads[1] == "attn" else heads[1].replace("attn", "attention") + " head"
        return tuple(f"{kind} {layer}.{head}" for head in range(n))

    def _head_count(self, layer: int) -> int:
        """Count the heads of a layer whose z stand in one axis, by its output matrix."""
        attention = getattr(self._model.blocks[layer], "attn", None)  # type: ignore[index]
        return len(getattr(attention, "W_O", [0]))

    def names(self, before: int | None = None) -> tuple[str, ...]:
        """Name all writers, or those before a layer, in the order in which they write."""
        return tuple(name for leaf in self._find_leaves(before) for name in leaf.names)

    def _find_leaves(self, before: int | None) -> list[_Leaf]:
        missing = [n for n in self._points if n not in self.leaves and _HEADS.fullmatch(n)]
        if missing:
            raise InfoFlowError(
                f"{', '.join(missing[:3])} did not fire, so what heads write is not known: "
                "expected a model that shows z in every layer"
            )
        return [
            leaf
            for name, leaf in self.leaves.items()
            if leaf.names
            and (before is None or _is_entrance(name) or (layer_of(name) or 0) < before)
        ]

    def shares(
        self,
        read: Float[Tensor, "..."],
        weights: Float[Tensor, "readout ..."],
        before: int | None = None,
    ) -> Float[Tensor, "readout writer pos"]:
        """Split sums of what was read over the writers and the positions at which they write.

        Args:
            read: part of the graph of a pass whose writers were cut.
            weights: by which its numbers are summed, for each readout.
            before: the layer before which the writers write; default, all.

        Returns:
            float64; derivative times what was written, summed over the width.

        Raises:
            InfoFlowError: where what was read has no derivative.
        """
        leaves = self._find_leaves(before)
        values = [leaf.value for leaf in leaves]
        size = sum(value.numel() for value in values)
        found = []
        for some in weights.split(max(1, _CHUNK // size)):
            derivatives = _derive(read, values, some)
            if all(one is None for one in derivatives):  # shares would be 0, whatever was written
                raise InfoFlowError(
                    f"what is read of the {kind_of(self._model)} has no derivative by what heads "
                    "and MLPs write, so it cannot be split: expected a readout that depends on the "
                    "output, and operations that have derivatives, which packed int8 weights lack; "
                    "load it in float32"
                )
            by_leaf = _fill(derivatives, values, some)
            parts = []
            for leaf, gradient in zip(leaves, by_leaf, strict=True):
                # [readout, pos, ...], without the axis of the batch, which has one sequence
                part = (gradient.double() * leaf.value.detach().double())[:, 0]
                n_readouts, n_pos = part.shape[:2]
                by_head = part.reshape(n_readouts, n_pos, len(leaf.names), -1).sum(-1)
                parts.append(by_head.transpose(1, 2))
            longest = max(part.shape[2] for part in parts)  # CLS is no token, and writes none
            parts = [pad(part, (0, longest - part.shape[2])) for part in parts]
            found.append(torch.cat(parts, dim=1))
        return torch.cat(found)

    def gradients_of_heads(
        self, value: Float[Tensor, " batch"]
    ) -> Iterator[
        tuple[str, Float[Tensor, "1 pos head d_head"], Float[Tensor, "1 pos head d_head"]]
    ]:
        """Differentiate a number by what heads wrote: the hook point, z and the derivative."""
        found = {n: leaf for n, leaf in self.leaves.items() if _HEADS.fullmatch(n)}
        values = [leaf.value for leaf in found.values()]
        gradients = differentiate(value, values, torch.ones_like(value)[None])
        for (name, leaf), gradient in zip(found.items(), gradients, strict=True):
            shape = (*leaf.value.shape[:2], len(leaf.names), -1)
            yield name, leaf.value.detach().reshape(shape), gradient[0].reshape(shape)


def differentiate(
    read: Tensor, by: Sequence[Tensor], weights: Float[Tensor, "readout ..."], **graph: bool
) -> list[Tensor]:
    """Return the derivatives of weighted sums of what was read, [readout, *shape] for each tensor.

    Args:
        read: what is differentiated.
        by: tensors of its graph; 0 for those on which it does not depend.
        weights: of its numbers, for each readout.
        graph: ``create_graph``.
    """
    return _fill(_derive(read, by, weights, **graph), by, weights)


def _derive(
    read: Tensor, by: Sequence[Tensor], weights: Float[Tensor, "readout ..."], **graph: bool
) -> list[Tensor | None]:
    """Return the derivatives of :func:`differentiate`, None where what was read has none."""
    settings: dict[str, Any] = {"retain_graph": True, "allow_unused": True, **graph}
    if not read.requires_grad or not by:  # without heads that write by themselves
        return [None for _ in by]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="There is a performance drop", category=UserWarning
            )
            found: Any = torch.autograd.grad(
                read, by, grad_outputs=weights, is_grads_batched=True, **settings
            )
    # one by one, where autograd cannot take all at once
    except RuntimeError:  # an operation that cannot be batched
        rows = [torch.autograd.grad(read, by, grad_outputs=one, **settings) for one in weights]
        found = [
            None if column[0] is None else torch.stack([*column])
            for column in zip(*rows, strict=True)
        ]
    return [*found]


def _fill(
    found: Sequence[Tensor | None], by: Sequence[Tensor], weights: Float[Tensor, "readout ..."]
) -> list[Tensor]:
    """Put 0 where there is no derivative."""
    return [
        t.new_zeros(len(weights), *t.shape) if g is None else g
        for t, g in zip(by, found, strict=True)
    ]


def _is_entrance(point: str) -> bool:
    """Say whether a hook point shows what enters the first block, or a part of it."""
    return point in _EMBEDDINGS or point.endswith("hook_resid_pre")


def write_nothing(activation: Tensor, hook: Any) -> Tensor:
    """Edit a hook point so that it carries zeros."""
    return torch.zeros_like(activation)


def _replace(value: Tensor, activation: Tensor, hook: Any) -> Tensor:
    return value.clone()  # which the model may write to in place


_ROOTS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_"}
_LENGTHS = {"norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "std", "var"}
_POWERS = {"pow", "pow_", "__pow__"}
_PAIRS = {"var_mean", "std_mean"}  # of which the mean is linear
_TIMES = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
_FUSED = {"layer_norm", "rms_norm"}
_FOLLOWED = MOVES | _TIMES | _FUSED | {"repeat_interleave"}


class HeldNorms(TorchFunctionMode):
    """Take the statistics of norms for constants while the block runs.

    Statistics are what roots, lengths and spreads give, wherever a model computes them; fused norms
    are computed in the open. So are gates by which what heads wrote is multiplied, where
    :meth:`follow` says what that is.

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
        self._written: dict[int, weakref.ref[Tensor]] = {}

    def follow(self, written: Tensor) -> None:
        """Hold what a tensor is multiplied by from here on, also where it is moved or normed."""
        # an id is used again once its tensor is gone, so the tensor itself is compared
        self._written[id(written)] = weakref.ref(written)

    def _is_written(self, value: Any) -> bool:
        known = self._written.get(id(value))
        return known is not None and known() is value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _FOLLOWED and any(map(self._is_written, args)):
            if name in _TIMES:
                args = tuple(
                    arg.detach() if isinstance(arg, Tensor) and not self._is_written(arg) else arg
                    for arg in args
                )
            out = self._run(func, name, args, kwargs)
            if isinstance(out, Tensor):
                self.follow(out)
            return out
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        if name in _FUSED:
            return self._normalise(name == "layer_norm", *args, **kwargs)
        if name == "group_norm":
            raise InfoFlowError(
                "the model has a group norm, whose statistics cannot be held fixed: expected layer "
                "norms or RMS norms"
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
                    "a second pass of the same model computed other norms than the first: expected "
                    "the same operations in each pass; take off hooks that change the model's "
                    "passes"
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


_SMALL = 1e-3  # of the size of all shares, below which what is left over is not said [chosen]
_SHOWN = 12  # rows in a notebook


@dataclass(frozen=True, eq=False, kw_only=True)
class Shares(Result):
    """Who wrote what is read of a model, in one input.

    While the statistics of norms are held, what is read is a sum over all that wrote the residual
    stream: its derivative by what was written, times that. These are direct shares: a head's share
    is of what it writes itself, not of what later heads and MLPs make of it.

    Attributes:
        values: float64 [writer, pos], the share of what each writer wrote at each position.
        by_key: float64 [head, key], the shares of heads by the position from which they took it:
            weight times value; those of a head add up to its share where z is the weighted values.
        constants: what biases make.
        value: what is read.
        writers: their names: "token embedding", "positional embedding", "head 0.3", "MLP 0".
        heads: the names of the heads.
        readout: what is asked, in words.
        is_linear: whether it is linear in the stream while norms are held; if not, shares are those
            of its linear part and need not add up.
        tokens: of the input, as one reads them.
    """

    small: ClassVar[bool] = True

    values: Float[Tensor, "writer pos"]
    by_key: Float[Tensor, "head key"]
    constants: float
    value: float
    writers: tuple[str, ...]
    heads: tuple[str, ...]
    readout: str
    is_linear: bool
    tokens: tuple[str, ...]

    @property
    def distance(self) -> float:
        """The readout minus the sum of all shares and constants.

        It is 0 up to rounding where only sums and norms follow what the layers write. Otherwise it
        is the effect of a soft cap, of an activation before the logits, or of a part that the model
        does not show.
        """
        return self.value - self.constants - float(self.values.sum())

    def by_writer(self) -> LabelledArray:
        """Sum the shares of each writer over all positions, [writer]."""
        return LabelledArray("share", self.values.sum(-1), ("writer",), {"writer": self.writers})

    def table(self) -> "pd.DataFrame":
        """Return a row for each writer, the largest first, and what it takes most from (heads)."""
        shares = self.values.sum(-1)
        order = shares.abs().argsort(descending=True, stable=True).tolist()
        places = {name: place for place, name in enumerate(self.heads)}
        rows = []
        for i in order:
            name = self.writers[i]
            row = {"writer": name, "share": float(shares[i]), "from": "", "of it": torch.nan}
            of_keys = self.by_key[places[name]] if name in places else None
            # of heads whose values are not shown, no key is known
            if of_keys is not None and not of_keys.isnan().any():
                key = int(of_keys.abs().argmax())
                row |= {"from": f"{self.tokens[key]} ({key})", "of it": float(of_keys[key])}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> str:
        """Say in a sentence who wrote most of it, and whether the shares add up."""
        rows = self.table()
        said = [f"{row.writer} {row.share:+.3g}" for row in rows.head(4).itertuples()]
        sentence = f"{self.readout} is {self.value:.4g}: {', '.join(said)}"
        if not self.is_linear:
            return f"{sentence}; it is not linear, so these shares of its linear part do not add up"
        if abs(self.distance) > _SMALL * float(self.values.abs().sum()):
            sentence += (
                f"; {self.distance:+.3g} is left over, as half precision rounds so much or the "
                "model does more than sums and norms with what is written: a soft cap, an "
                "activation before the logits, or a part that is not shown"
            )
        return sentence

    def _say(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        facts = {"": self.summary(), "value": self.value, "constants": self.constants}
        more = "more: .table(), .to_frame(), .plot(), .save(path)"
        return panel(type(self).__name__, facts, self.notes, more, self.table().head(_SHOWN))

    def _coords(self) -> dict[str, tuple[str, ...]]:
        return {"writer": self.writers, "head": self.heads}


@takes_model
@checked
def measure_shares(model: nn.Module, inputs: Inputs, readout: Readout) -> Shares:
    """Split what is read off a model over embeddings, heads and MLPs, exactly: who wrote it?

    Two passes and one derivative: a pass whose writers are leaves, and one in which nothing is
    written, which shows what biases make. No weight is read, and no family is known.

    Args:
        model: any Transformer.
        inputs: one sequence: a text, token ids [1, pos], or vectors [1, pos, d_token].
        readout: what is asked, such as ``LogitDifference(" Mary", " John")``.

    Raises:
        InfoFlowError: for several sequences, what is no readout, an answer that is no token, and
            models that do not show what their heads write.
    """
    check_one_device(model)
    batches = read_one(model, inputs)
    rows = list(batches.rows)
    asked, batch = bind_readout(readout, model), batches.whole()
    with eval_mode(model):
        writers, held = Writers(model), HeldNorms()
        points = [name for name in _attention_points(writers) if name in hook_points(model)]
        # norms are held at their scale of this pass, so that the map from writers to readout is
        # linear
        with torch.enable_grad(), held:
            caught = call(
                model, batch, points, edit=list(writers.cut(held)), output=True, keep_graph=True
            )
            value = asked.read(caught.output)
            values = writers.shares(value, torch.ones_like(value)[None])[0]
            by_key = _split_by_key(
                writers, value, {n: a.detach() for n, a in caught.activations.items()}
            )
        # the same norms, and writers that write nothing: what is left are constants
        with HeldNorms(held.statistics):
            silent = call(model, batch, edit=list(writers.silence()), output=True)
        constants = float(asked.read(silent.output)) if asked.is_linear else 0.0
    return Shares(
        values=values.cpu(),
        by_key=by_key.cpu(),
        constants=constants,
        value=float(value.detach()),
        writers=writers.names(),
        heads=tuple(name for name in writers.names() if "head" in name),
        readout=str(readout),
        is_linear=asked.is_linear,
        tokens=readable_tokens(model, rows)[0],
        record=RunRecord.from_model(model, {"probe": "shares", "readout": str(readout)}),
    )


def _attention_points(writers: Writers) -> list[str]:
    """Hook points of patterns and values, of each attention whose heads write."""
    attentions = [name.removesuffix("hook_z") for name in writers.points if name.endswith("hook_z")]
    return [f"{name}hook_{what}" for name in attentions for what in ("pattern", "v")]


def _split_by_key(
    writers: Writers, value: Tensor, activations: dict[str, Tensor]
) -> Float[Tensor, "head key"]:
    """Split the shares of heads over the keys from which they took them; NaN where not shown."""
    rows = [torch.zeros(0, 0, dtype=torch.float64)]
    for name, z, gradient in writers.gradients_of_heads(value):
        place = name.removesuffix("hook_z")
        pattern, v = activations.get(f"{place}hook_pattern"), activations.get(f"{place}hook_v")
        n_heads = z.shape[2]
        if pattern is None or v is None:
            rows.append(torch.full((n_heads, z.shape[1]), torch.nan, dtype=torch.float64))
            continue
        # bridges show values of all heads in one axis; grouped ones serve several heads
        v = v.unflatten(-1, (-1, z.shape[-1])) if v.ndim == 3 else v
        v = v.repeat_interleave(n_heads // v.shape[2], dim=2)
        brought = torch.einsum("qhd,khd->hqk", gradient[0].double(), v[0].double())
        rows.append((pattern[0].double() * brought).sum(dim=1))
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1])) for row in rows])

"""Single positions of a model: what a state at one place becomes while attention stands still.

Between two attentions each position stands alone. So what one head changes at one place is followed
on that place only, through norms and MLPs, at the cost of one token: the model's own blocks run on
single positions, with the outputs of their heads pinned to those of a whole run.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import bind_to_thread
from infoflow_lens.hooks.answer.question import Change, Question, keep_shown, make_edits
from infoflow_lens.hooks.influence.base import find_precision
from infoflow_lens.hooks.model.call import (
    AXES,
    HookFunction,
    NamedHook,
    call,
    catch,
    is_stream,
    mark_own_call,
)
from infoflow_lens.hooks.model.points import check_is_attention, hook_points
from infoflow_lens.hooks.model.sites import rebuild

_NEAR = 1e-3  # of the largest number: how near a single position must come to the whole run
_LINEAR = 1e-4  # of a derivative: how much of it may point elsewhere where scores are not capped
_ROUNDINGS = 8  # that may add up, where precision is low


class HeadRow(NamedTuple):
    """How one head comes to the weights of one query.

    Attributes:
        products: [key], of the query and the keys.
        scores: [key], 0 for closed keys.
        is_open: [key].
        logs: [key], logarithms of the weights, which with the sink have the sum 1.
        sink: the weight that belongs to no key.
    """

    products: Tensor
    scores: Tensor
    is_open: Tensor
    logs: Tensor
    sink: Tensor


@dataclass(frozen=True)
class LayerRun:
    """One layer of a whole run.

    Attributes:
        state: [pos, d_model], what enters the block.
        q, k, v: [pos, head, d_head], as their products read them; keys and values may be grouped.
        z: [pos, head, d_head].
        scores: [head, query, key], -inf for closed keys.
        sink: [head, query], the weight that belongs to no key.
    """

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    scores: Tensor
    sink: Tensor
    _rows: dict[tuple[int, int], HeadRow] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def take(self, side: str, head: int) -> Float[Tensor, "pos d_head"]:
        """Take what a head reads as "q", "k" or "v"."""
        return _take_head(getattr(self, side), head, len(self.scores))

    def row(self, head: int, query: int) -> HeadRow:
        """Find how a head comes to the weights of a query, once."""
        if (head, query) not in self._rows:
            scores = self.scores[head, query].double()
            is_open, sink = scores > -torch.inf, self.sink[head, query].double()
            self._rows[head, query] = HeadRow(
                products=self.take("k", head) @ self.take("q", head)[query],
                scores=scores.masked_fill(~is_open, 0),
                is_open=is_open,
                logs=scores - scores.logsumexp(0) + torch.log1p(-sink.clamp(max=1 - 1e-12)),
                sink=sink,
            )
        return self._rows[head, query]


class Streams:
    """The blocks of an opened model on single positions, and the whole runs of both texts.

    Args:
        question: whose model was opened by ``open_model``.

    Attributes:
        clean, other: by layer.
        rules: by layer, how products of queries and keys become scores.
        end: the position that the readout reads.

    Raises:
        InfoFlowError: for a model whose blocks give something else on single positions.
    """

    def __init__(self, question: Question) -> None:
        self.question, self.model = question, question.model
        if not hasattr(self.model, "anatomy"):
            raise InfoFlowError(
                f"paths are followed on the blocks of a model as it is, not of a "
                f"{type(self.model).__name__}: expected a model as open_model gives it"
            )
        self.blocks = [block.module for block in self.model.anatomy.blocks]  # type: ignore[union-attr]
        if any(block.axes != AXES for block in self.model.anatomy.blocks):  # type: ignore[union-attr]
            raise InfoFlowError(
                f"the blocks of {type(self.model.original_model).__name__} pass states on in "
                "another order than [batch, pos, width]: paths cannot be followed on single "
                "positions"
            )
        self.end = question.end
        self._names = [self._find_points(layer) for layer in range(question.n_layers)]
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.rules: list[ScoreRule] = []
        self.clean = self.run(question.clean.tokens)
        self.other = self.run(question.other.tokens)
        with torch.no_grad():
            self._check()

    # Whole runs

    def _find_points(self, layer: int) -> dict[str, str]:
        """Find the hook points of what an attention reads and gives, by "q", "k", "v" and so on."""
        known, place = hook_points(self.model), f"blocks.{layer}.attn.hook_"
        check_is_attention(self.model, f"{place}z")
        names = {"scores": f"{place}attn_scores", "pattern": f"{place}pattern"}
        names |= {"v": f"{place}v", "z": f"{place}z"}
        for side in ("q", "k"):
            names[side] = next(
                (n for n in (f"{place}rot_{side}", f"{place}{side}") if n in known), ""
            )
        missing = [what for what, name in names.items() if name not in known]
        if missing:
            raise InfoFlowError(
                f"attention layer {layer} does not show {', '.join(missing)}: paths need them all; "
                "open_model(model).lacks() says why"
            )
        return names

    def run(self, tokens: Int[Tensor, "1 pos"], changes: Sequence[Change] = ()) -> list[LayerRun]:
        """Run a text whole, with changes."""
        names = [name for points in self._names for name in points.values()]
        states = [self.question.state(layer) for layer in range(self.question.n_layers)]
        shown: dict[str, Tensor] = {}
        texts = self.question.batch(tokens)
        # of the first run also scores as a function of queries, and what blocks are called with
        if not self.rules:
            with torch.enable_grad(), self._record():
                edits = [(p["q"], keep_shown(p["q"], shown)) for p in self._names]
                caught = call(self.model, texts, [*names, *states], edit=edits, keep_graph=True)
                at = caught.activations
                self.rules = [
                    ScoreRule.find(shown[p["q"]], at[p["k"]], at[p["scores"]]) for p in self._names
                ]
        else:
            with torch.no_grad():
                edits = make_edits([changes])
                caught = call(self.model, texts, [*names, *states], edit=edits)
        self.question.forwards += 1
        found = []
        for points, state in zip(self._names, states, strict=True):
            part = {what: caught.activations[name].detach()[0] for what, name in points.items()}
            rows = part["pattern"].float().sum(dim=-1)
            sink = (1 - rows).clamp(min=0)
            # what weights lack to 1 by rounding is no sink: it would count where all scores fall
            least = _ROUNDINGS * torch.finfo(part["pattern"].dtype).eps
            sink = sink * (sink.amax(dim=-1, keepdim=True) > least)
            entered = caught.activations[state].detach()[0]
            four = {what: part[what] for what in "qkvz"}
            scores = part["scores"].float()
            found.append(LayerRun(entered, **four, scores=scores, sink=sink))
        return found

    @contextmanager
    def _record(self) -> Iterator[None]:
        """Keep what each block is called with."""

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._given.append((args, kwargs))

        with ExitStack() as stack:
            for module in dict.fromkeys(self.blocks):
                handle = module.register_forward_pre_hook(bind_to_thread(record), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    # Single positions

    def step(
        self,
        layer: int,
        states: Float[Tensor, "row d_model"],
        places: Int[Tensor, " row"],
        z: Float[Tensor, "row head d_head"],
    ) -> dict[str, Tensor]:
        """Run a block on single positions, its heads pinned.

        Returns:
            "q", "k", "v" [row, head, d_head], and "out" [row, d_model], what leaves the block.
        """
        # a block that runs in several layers is that of the first one, where it runs alone
        points, shown = self._names[self.blocks.index(self.blocks[layer])], dict[str, Tensor]()

        def look(what: str) -> HookFunction:
            def hook_fn(activation: Tensor, hook: Any) -> None:
                shown[what] = activation.detach()[:, 0]

            return hook_fn

        def pin(activation: Tensor, hook: Any) -> Tensor:
            return z[:, None].reshape(activation.shape).to(activation.dtype)

        edits: list[NamedHook] = [(points[what], look(what)) for what in ("q", "k", "v")]
        edits.append((points["z"], pin))
        args, kwargs = self._move_arguments(layer, states, places)
        model: Any = self.model
        with mark_own_call(), catch(model, (), edits), model.watch():
            out = self.blocks[layer](*args, **kwargs)
        # some blocks give their states first in a tuple
        while not isinstance(out, Tensor):
            out = out[0]
        # a share of a whole pass: these positions of one block
        self.question.forwards += len(states) / self.question.n_pos / self.question.n_layers
        return {**shown, "out": out.detach().reshape(states.shape)}

    def _move_arguments(
        self, layer: int, states: Tensor, places: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move what a block is called with to single positions, as sequences of one."""
        args, kwargs = self._given[layer]
        stream = next(t for t in (*args, *kwargs.values()) if is_stream(t))
        n_pos = self.question.n_pos

        def move(value: Any) -> Any:
            if value is stream:
                return states[:, None]
            if isinstance(value, Tensor):
                if is_stream(value) and value.shape[:2] == (1, n_pos):  # such as rotations
                    return value[0, places.to(value.device), None]
                axes = [axis for axis, size in enumerate(value.shape) if size == n_pos]
                if value.ndim >= 2 and (len(axes) > 1 or value.ndim == 4):
                    return None  # a mask: a position sees itself
                if not axes:
                    return value
                if value.dtype == torch.bool or value.ndim == 1:
                    return None
                picked = value.index_select(axes[0], places.to(value.device))
                if axes[0] == 1 and len(value) == 1:  # [1, pos, ...]
                    return picked[0][:, None]
                return picked
            if isinstance(value, (tuple, list)):
                return rebuild(value, [move(one) for one in value])
            if isinstance(value, Mapping):
                return {name: move(one) for name, one in value.items()}
            # a cache holds keys of the whole text, and a position alone needs none
            return None if hasattr(value, "get_seq_length") else value

        return tuple(move(one) for one in args), {name: move(v) for name, v in kwargs.items()}

    def _check(self) -> None:
        """Refuse blocks that give something else on single positions than in the whole run.

        Raises:
            InfoFlowError: naming the block.
        """
        question = self.question
        every = torch.arange(question.n_pos)
        last = question.clean.shown[question.state(question.n_layers)][0]
        for layer, run in enumerate(self.clean):
            after = self.clean[layer + 1].state if layer + 1 < len(self.clean) else last
            try:
                found = self.step(layer, run.state, every, run.z)
                pairs = [(found["out"], after), *((found[s], getattr(run, s)) for s in "qkv")]
                far = max(
                    float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs
                )
            except (
                RuntimeError, TypeError, StopIteration, LookupError, ValueError, AttributeError
            ) as error:  # fmt: skip
                far, reason = torch.inf, f" ({str(error).splitlines()[0][:120]})"
            else:
                reason = ""
            if far > _find_tolerance(_NEAR, run.state):
                raise InfoFlowError(
                    f"block {layer} of {type(self.model.original_model).__name__} gives something "
                    f"else at a single position than in the whole text{reason}: paths cannot be "
                    "followed; expected blocks in which positions meet in attention alone"
                )
        point, others = question.state(question.n_layers), every[every != self.end]
        elsewhere = float(question.measure([[question.exchange(point, others)]])[0])
        if not abs(elsewhere) <= _find_tolerance(_NEAR, last) * max(1.0, abs(question.gap)):
            raise InfoFlowError(
                f"{question.readout} reads other positions than {self.end}: expected a readout of "
                "one position, to which paths lead"
            )
        for layer in range(question.n_layers):
            self._check_attention(layer)

    def _check_attention(self, layer: int) -> None:
        """Refuse attention that is not found anew: the clean run's, with all that the other reads.

        Raises:
            InfoFlowError: naming the layer.
        """
        run, other, end = self.clean[layer], self.other[layer], self.end
        made = {"q": other.q, "k": other.k, "v": other.v}
        rows = {(kind, at): at for kind in ("key", "value") for at in range(len(other.k))}
        rows["query", end] = end
        found = [
            self.attend(run, (layer, head, end), made, rows) for head in range(len(run.scores))
        ]
        expected = other.z[end]
        far = float((torch.stack(found) - expected).abs().max() / expected.abs().max())
        if not far <= _find_tolerance(_NEAR, run.state):
            raise InfoFlowError(
                f"the attention of block {layer} of {type(self.model.original_model).__name__} is "
                "no softmax of products of queries and keys, scaled or capped, with what positions "
                f"add: its outputs, computed again in this way, differ by {far:.1%}, so paths "
                "cannot be followed"
            )

    # Attention of one reader, computed anew

    def attend(
        self,
        run: LayerRun,
        reader: tuple[int, int, int],
        made: Mapping[str, Float[Tensor, "row _head _d_head"]],
        rows: Mapping[tuple[str, int], int],
    ) -> Float[Tensor, " d_head"]:
        """Compute what a head gives at a position of a run, with another query, keys or values.

        Args:
            run: the layer's run.
            reader: the layer, the head and the position.
            made: "q", "k" and "v" of some states, as :meth:`step` gives them.
            rows: by input ("query", "key" or "value") and position, which of these take its place.
        """
        layer, head, query = reader
        own = run.row(head, query)
        given = {side: run.take(side, head) for side in "qkv"}
        for side in {kind[0] for kind, _ in rows}:
            given[side] = given[side].clone()
        for (kind, at), row in rows.items():
            given[kind[0]][at] = _take_head(made[kind[0]], head, len(run.scores))[row]
        products, values = given["k"] @ given["q"][query], given["v"]
        step = (products - own.products).double()
        change = self.rules[layer].change(head, own.scores, step)
        weights = (own.logs + change).masked_fill(~own.is_open, -torch.inf).exp()
        weights = weights / (weights.sum() + own.sink)
        return (weights.to(values.dtype) @ values).detach()


def _take_head(
    vectors: Float[Tensor, "row _head d_head"], head: int, n_heads: int
) -> Float[Tensor, "row d_head"]:
    """Take what a head reads; keys and values may be grouped: several in a row read the same."""
    return vectors[:, head * vectors.shape[1] // n_heads]


def _find_tolerance(tolerance: float, tensor: Tensor) -> float:
    """Return the tolerance, or what rounding in the precision of a tensor needs."""
    return max(tolerance, _ROUNDINGS * torch.finfo(find_precision(tensor)).eps)


@dataclass(frozen=True)
class ScoreRule:
    """How products of queries and keys become scores, but for what positions add.

    Attributes:
        scale: [head], what a product is multiplied by.
        cap: the bound c of scores c tanh(product / c); infinite where there is none.
    """

    scale: Float[Tensor, " head"]
    cap: float

    @classmethod
    def find(cls, q: Tensor, k: Tensor, scores: Tensor) -> "ScoreRule":
        """Read it off the derivatives of two scores of the last query.

        Their difference is taken, from which a subtracted largest score is gone. Where it is no
        multiple of the difference of the keys, scores are capped: the cap is what makes the two
        multiples of it.
        """
        n_heads = scores.shape[1]
        open_ = (scores[0, 0, -1] > -torch.inf).nonzero().flatten().tolist()
        first, last = open_[0], open_[-1]
        keys = k[0].detach().double().repeat_interleave(n_heads // k.shape[2], dim=1)
        two = scores[0, :, -1, last]
        one = scores[0, :, -1, first] if first != last else torch.zeros_like(two)
        (gradient,) = torch.autograd.grad((two - one).sum(), q, retain_graph=True)
        slope = gradient[0, -1].double()
        # [head, d_head, 2]: the two keys, of which the slope is a sum with one factor each
        pair = torch.stack([keys[last], -keys[first] * float(first != last)], dim=-1)
        along = pair.sum(dim=-1)
        scale = (slope * along).sum(-1) / along.square().sum(-1).clamp(min=1e-30)
        rest = (slope - scale[:, None] * along).norm(dim=-1) / slope.norm(dim=-1).clamp(min=1e-30)
        if float(rest.max()) < _find_tolerance(_LINEAR, q) or first == last:
            return cls(scale, torch.inf)
        # the slope of c tanh(x / c) at the score s is 1 - (s / c)^2, so the factors at two scores
        # give c and the scale
        of_last, of_first = torch.linalg.lstsq(pair, slope[..., None]).solution[..., 0].T
        two, one = two.detach().double().square(), one.detach().double().square()
        bounds = (of_last * one - of_first * two) / (of_last - of_first)  # c squared, by head
        # the head whose factors differ most, as where they are near one another rounding decides
        best = int((of_last / of_first - 1).abs().argmax())
        cap = float(bounds[best].clamp(min=1e-30).sqrt())
        return cls(of_last / (1 - two / cap**2), cap)

    def change(
        self, head: int, scores: Float[Tensor, " key"], product: Float[Tensor, " key"]
    ) -> Float[Tensor, " key"]:
        """Find what a change of products adds to scores."""
        step = self.scale[head] * product
        if self.cap == torch.inf:
            return step
        # back to the product before the cap, where the change is added
        raw = self.cap * (scores / self.cap).clamp(-1 + 1e-12, 1 - 1e-12).atanh()
        return self.cap * ((raw + step) / self.cap).tanh() - scores

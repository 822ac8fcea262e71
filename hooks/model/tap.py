"""The tap: sees each attention of a pass, whatever model makes it, and lets it be edited.

It is one torch function mode, which is of this thread alone and sets nothing on the model. It sees

- a softmax over keys: its input is the scores, its output the pattern; the product that reads the
  pattern shows values and z, the product that made the scores shows queries and keys;
- ``scaled_dot_product_attention``, which it computes in the open, as softmax and products;
- ``nn.MultiheadAttention``, whose function it runs from a copy that torch's dispatch does not hide.

Tensors are known by identity, never by a name in the model: a product of two tensors may be scores,
an explicit list of operations carries it on, a softmax over its last axis may be attention, and a
product that reads that pattern makes it so. What an operation outside the list touches is lost,
and so refused; nothing is guessed. Closed keys are read from what closed them (masks that were
added, filled in, or given), never from the pattern, whose weights may underflow to 0.

Models write ``matmul``, ``bmm``, ``baddbmm`` or ``einsum``, with their axes in any order.
:class:`Operands` has the two tensors of a call and makes it again with others; :class:`Layout`
shows them as [..., pos, d], and puts them back.
"""

import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from infoflow_lens.foundation.errors import InfoFlowError

PRODUCTS = frozenset(
    ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "baddbmm_", "einsum")
)
_SECOND_NAMES = ("batch1", "mat1", "other", "mat2", "batch2")  # of operands that are given by name

Move: TypeAlias = Callable[[Tensor], Tensor]


class Operands:
    """The operands of a product, wherever its call has them.

    Args:
        name: of the function.
        args, kwargs: of the call.

    Attributes:
        pair: the two operands; None where there are fewer. Others may be put in their place.
        equation: of an einsum, without blanks.
        base: what baddbmm adds to the product.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.equation: str | None = None
        self.base: Tensor | None = None
        self._is_list = False
        # operands come as a list, one by one, or by name; an einsum begins with its equation
        rest = list(args)
        if rest and isinstance(rest[0], str):
            self.equation = _name_output(rest.pop(0).replace(" ", ""))
            self._is_list = bool(rest) and isinstance(rest[0], (tuple, list))
            rest = list(rest[0]) if self._is_list else rest
        elif name.startswith("baddbmm"):
            self.base = rest.pop(0) if rest else kwargs["input"]
        self._names = [name for name in _SECOND_NAMES if name in kwargs]
        rest += [kwargs[name] for name in self._names]
        known = [*self._names, *(["input"] if self.base is not None else [])]
        self._kwargs = {name: v for name, v in kwargs.items() if name not in known}
        self._more = rest[2:]
        self.pair: tuple[Any, Any] = (rest[0], rest[1]) if len(rest) >= 2 else (None, None)
        self._given = self.pair, args, kwargs

    def run(self, func: Callable[..., Any]) -> Any:
        """Make the call, with the operands that `pair` has now."""
        pair, args, kwargs = self._given
        # with its own operands the call is made as the model has written it
        if self.pair is pair:
            return func(*args, **kwargs)
        if self.equation is not None:
            return func(self.equation, *([self.pair] if self._is_list else self.pair))
        if self._names == ["batch1", "batch2"]:
            return func(self.base, **dict(zip(self._names, self.pair)), **self._kwargs)
        before = () if self.base is None else (self.base,)
        return func(*before, *self.pair, *self._more, **self._kwargs)


def _name_output(equation: str) -> str:
    """Name the output's axes where an einsum leaves them out: those named once, by the alphabet."""
    if "->" in equation or "." in equation:
        return equation
    axes = equation.replace(",", "")
    return f"{equation}->{''.join(sorted(axis for axis in set(axes) if axes.count(axis) == 1))}"


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _turn(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


@dataclass(frozen=True)
class Layout:
    """How the operands and the output of a product are read as [..., pos, d], and put back."""

    left: Move = _keep
    left_back: Move = _keep
    right: Move = _keep
    right_back: Move = _keep
    out: Move = _keep
    out_back: Move = _keep

    @classmethod
    def parse_scores(cls, equation: str | None) -> "Layout | None":
        """Find the layout of queries and keys; None for an einsum that is a projection."""
        if equation is None:
            return cls(right=_turn, right_back=_turn)
        # dots stand for axes without names; of scores the last two axes are queries and keys
        given, _, out = equation.partition("->")
        if "." in equation or len(out) < 2:
            return None
        q, k = given.split(",")
        inner = "".join(axis for axis in q if axis in k and axis not in out)
        heads = out[:-2]
        # keys may lack axes of heads, where several heads share them; queries have every axis
        fits = set(q) == {*heads, out[-2], *inner} and set(k) <= {*heads, out[-1], *inner}
        if not fits:
            return None
        return cls(*_mover(q, heads + out[-2] + inner), *_mover(k, heads + out[-1] + inner))

    @classmethod
    def parse_values(cls, equation: str | None, swapped: bool) -> "Layout":
        """Find the layout of values and z; `swapped` where the pattern stands on the right."""
        if equation is None or "." in equation:
            return cls()
        given, out = equation.split("->")
        pattern, values = reversed(given.split(",")) if swapped else given.split(",")
        heads, d = pattern[:-2], "".join(axis for axis in out if axis not in pattern)
        right, right_back = _mover(values, heads + pattern[-1] + d)
        out_move, out_back = _mover(out, heads + pattern[-2] + d)
        return cls(right=right, right_back=right_back, out=out_move, out_back=out_back)


def _mover(have: str, want: str) -> tuple[Move, Move]:
    """Make functions that bring axes named `have` into the order `want`, and back."""
    # axes that are missing have length 1
    order = [have.index(axis) for axis in want if axis in have]
    missing = [place for place, axis in enumerate(want) if axis not in have]

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.permute(order)
        for axis in missing:
            tensor = tensor.unsqueeze(axis)
        return tensor

    def back(tensor: Tensor) -> Tensor:
        for axis in reversed(missing):
            tensor = tensor.select(axis, 0)
        return tensor.permute([order.index(place) for place in range(len(order))])

    return move, back


Site = Literal["q", "k", "scores", "pattern", "v", "z"]

# What is added to close a key: -1e4 in old models, the lowest number or -inf in others. No bias of
# position comes near it (ALiBi adds -.5 a position). It bounds masks, never scores.
CLOSED = -9e3

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_CASTS = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}
COPIES = frozenset(_CASTS | {"contiguous", "clone", "view", "reshape", "dropout"})
_TURNS = {"transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"}
MOVES = COPIES | _TURNS
_SOFTMAXES = {"softmax", "special_softmax", "_softmax"}
_SUBTRACTIONS = {"sub", "sub_", "subtract", "__sub__", "__isub__"}
_FILLS = {"masked_fill", "masked_fill_"}
_SCALINGS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "neg", "__neg__"}
_SCALINGS |= {"div", "div_", "__truediv__", "__itruediv__"}
_CAPS = {"where", "tanh", "clamp", "clamp_", "max", "maximum", "minimum", "nan_to_num"}
_PARTS = {"expand", "narrow", "cat", "concat", "__getitem__", "alpha_dropout"}
# what scores go through on their way to the softmax, and patterns on their way to the values
_FOLLOWED = ADDITIONS | _SUBTRACTIONS | _FILLS | MOVES | _SCALINGS | _CAPS | _PARTS
_WHOLE = {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"}
NOTED = _FOLLOWED | _SOFTMAXES | PRODUCTS | _WHOLE  # all that the tap does not let pass unseen


@dataclass
class _Closing:
    """What closed keys between a product and its softmax: added, subtracted, or filled in.

    Attributes:
        tensor: what was added, or where the fill went.
        shape: of the scores there.
        fill: the value that was filled in, if it was.
        sign: -1 where the tensor was subtracted.
    """

    tensor: Tensor
    shape: torch.Size
    fill: Any = None
    sign: int = 1

    def find_keys(self) -> Bool[Tensor, "..."]:
        """Find which keys it closed, in the shape of the scores."""
        if self.fill is None:
            return (self.tensor * self.sign <= CLOSED).expand(self.shape)
        if bool(torch.as_tensor(self.fill).max() <= CLOSED):
            return self.tensor.bool().expand(self.shape)
        # a fill with an ordinary number, such as 0, is no mask
        return torch.zeros_like(self.tensor, dtype=torch.bool).expand(self.shape)


@dataclass
class _Product:
    """A product that may be of queries and keys, or a sum of several, on its way to a softmax."""

    q: Tensor
    k: Tensor
    n_keys: int
    number: int
    closings: tuple[_Closing, ...] = ()
    n_products: int = 1


@dataclass(eq=False)
class AttentionCall:
    """One attention of a pass, as far as the tap knows it.

    Attributes:
        number: which softmax or fused attention it is, of its block or pass.
        how: a "softmax" in sight, or "fused", which the tap computes in the open.
        batch: sequences in the pass, where heads may stand in the axis of the batch.
        product: the number of the product that made the scores; None where that is not known.
        n_products: products whose sum the scores are; with several, q and k are of the first one.
        sinks: columns of the softmax behind the keys, which belong to no key.
        is_grouped: whether values come as the model has them, in fewer heads than the pattern.
        is_read: whether a product has read the pattern: it is attention, and no router.
        distance: of z in the open from the fused z, where the tap compares them.
        seen: the tensors by site, where no `watch` takes them.
    """

    number: int
    how: Literal["softmax", "fused"]
    batch: int | None = None
    product: int | None = None
    n_products: int = 0
    sinks: int = 0
    is_grouped: bool = False
    is_read: bool = False
    distance: float | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)
    closings: tuple[_Closing, ...] = ()
    is_causal: bool = False
    scores: Tensor | None = None

    def visible(self) -> Bool[Tensor, "batch head query key"]:
        """Find which keys this call leaves open to each query, read from what closed the others."""
        assert self.scores is not None  # every call that is shown has them
        shape, device = self.scores.shape, self.scores.device
        closed = torch.zeros(shape, dtype=torch.bool, device=device)
        if self.is_causal:
            # torch counts from the first query and the first key, also where there are more keys
            closed |= torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1)
        for closing in self.closings:
            found = closing.find_keys()
            if found.shape[-1] < shape[-1]:  # made before the sinks came
                found = F.pad(found, (0, shape[-1] - found.shape[-1]))
            # a mask from before the scores were reshaped has the same numbers in other axes
            closed |= found.reshape(shape) if found.numel() == closed.numel() else found
        # no product of finite queries and keys is half of the lowest number of its precision
        closed |= self.scores <= torch.finfo(self.scores.dtype).min / 2
        return ~split_heads(closed, self.batch)[..., : shape[-1] - self.sinks]


def split_heads(tensor: Tensor, batch: int | None) -> Tensor:
    """Show [batch * head, ...] as [batch, head, ...], and [batch, group, head, ...] in one axis."""
    if tensor.ndim == 3 and batch and tensor.shape[0] % batch == 0:
        return tensor.unflatten(0, (batch, -1))
    return tensor.flatten(1, -3) if tensor.ndim > 4 else tensor


Watch: TypeAlias = Callable[[AttentionCall, Site, Tensor], Tensor | None]

_SDPA_DEFAULTS = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0,
    "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
# the function is a builtin without a signature, so its arguments are bound to this one
_SDPA = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in _SDPA_DEFAULTS.items()
    ]
)
# torch's own code, with globals in which no tensor asks for a dispatch of the whole function
_MULTIHEAD: Any = F.multi_head_attention_forward
_multihead_in_sight: Any = types.FunctionType(
    _MULTIHEAD.__code__,
    {**vars(F), "has_torch_function": lambda arguments: False},
    _MULTIHEAD.__name__,
    _MULTIHEAD.__defaults__,
    _MULTIHEAD.__closure__,
)


_stances = ExitStack()
_stances_lock = threading.Lock()
_watching = 0


@contextmanager
def suspend_compiler() -> Iterator[None]:
    """Run functions that torch.compile made as what they were made of, while the block lasts.

    The tap cannot see into compiled code, and the compiler would compile the tap. The stance is
    that of the process: the first block takes it, the last gives it back.
    """
    global _watching
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        yield
        return
    # blocks may be nested and in several threads, and the stance is the process's
    with _stances_lock:
        if not _watching:
            _stances.enter_context(torch.compiler.set_stance("force_eager"))
        _watching += 1
    try:
        yield
    finally:
        with _stances_lock:
            _watching -= 1
            if not _watching:
                _stances.close()


class Tap(TorchFunctionMode):
    """Show each attention of a pass to `watch`, site by site, in the order of the pass.

    What `watch` returns goes on in the place of the tensor; None leaves it, bit for bit. Queries,
    keys, values and z come as [batch, head, pos, d], scores and patterns as [batch, head, query,
    key], as views where that is possible. A softmax of other tensors (a router's) shows scores and
    pattern, too, and never v and z.

    Args:
        watch: gets every attention; default, keep what it would get in `calls`.
        batch: sequences in the pass, for models that put heads into the axis of the batch.
        wants: whether the attention of a number is looked at; fused attention that nobody looks at
            stays fused.
        compare: measure how far attention in the open is from fused attention, which then runs too.

    Attributes:
        calls: attentions of the pass, where there is no `watch`.
        n_heads: heads, where they are known; a single query may come by groups of heads.
        score_products: by the number of a product, the number of the attention whose scores it
            makes; only these products show q and k to `watch`, as they run before the softmax.
        n_attentions, n_products: so many since the last :meth:`restart`.
    """

    def __init__(
        self,
        watch: Watch | None = None,
        batch: int | None = None,
        wants: Callable[[int], bool] = lambda number: True,
        compare: bool = False,
    ) -> None:
        super().__init__()
        self.calls: list[AttentionCall] = []
        self._keeps, self._watch = watch is None, watch or self._keep
        self.batch, self._wants, self._compares = batch, wants, compare
        self.n_heads: int | None = None
        self.score_products: dict[int, int] = {}
        self._is_aside = False
        self.restart()

    def restart(self) -> None:
        """Count anew, and forget what was followed: at the start of a pass, or of a block."""
        self.n_attentions = self.n_products = 0
        self._followed: dict[int, tuple[Any, _Product | AttentionCall]] = {}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look away while the block runs: what is computed there is no part of the model."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._is_aside or name not in NOTED:  # most operations, so it is asked first
            return func(*args, **kwargs)
        if name in _SOFTMAXES:
            return self._softmax(func, args, kwargs)
        if name in PRODUCTS:
            return self._product(func, name, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self._run_sdpa(args, kwargs)
        # its parts are run one by one, so that they are seen
        if func is _MULTIHEAD:
            # torch switches a mode off within its own function, so it is entered again
            with self:
                return _multihead_in_sight(*args, **kwargs)
        if name == "flex_attention":
            raise InfoFlowError(
                "the model calls flex_attention, which compiles its own code, so that no softmax "
                'can be seen: expected set_attn_implementation("eager") or "sdpa"'
            )
        out = func(*args, **kwargs)
        # carried on only while a product or a pattern is on its way
        if self._followed:
            self._follow(name, args, kwargs, out)
        return out

    # Showing

    def _keep(self, call: AttentionCall, site: Site, tensor: Tensor) -> None:
        if not self.calls or self.calls[-1] is not call:
            self.calls.append(call)
        call.seen[site] = tensor

    def _show(self, call: AttentionCall, site: Site, tensor: Tensor) -> Tensor:
        """Return the tensor to go on with, the same object if nobody replaces it."""
        part = tensor
        # sinks are no keys
        if site in ("scores", "pattern") and call.sinks:
            part = tensor[..., : tensor.shape[-1] - call.sinks]
        by_head, n = split_heads(part, self.batch), self.n_heads
        # heads in groups: one query axis for several, as in multi-query models
        if n and site not in ("k", "v") and by_head.ndim == 4 and by_head.shape[1] not in (n, 1):
            by_head = by_head.reshape(
                by_head.shape[0], n, -1, by_head.shape[-1]
            )  # one query, by groups
        answer = self._watch(call, site, by_head)
        if answer is None or answer is by_head:
            return tensor
        # back to the axes and the precision of the model, with the sinks as they were
        answer = answer.to(tensor.dtype).reshape(part.shape)
        return answer if part is tensor else torch.cat([answer, tensor[..., -call.sinks :]], -1)

    # Following: from a product to a softmax, and from that to a product

    def _origin(self, tensor: Any) -> _Product | AttentionCall | None:
        # an id is used again once its tensor is gone, so the tensor itself is compared
        entry = self._followed.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _mark(self, tensor: Tensor, origin: _Product | AttentionCall) -> None:
        self._followed[id(tensor)] = (weakref.ref(tensor), origin)

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Carry a product or a pattern on through an operation."""
        # cat takes its tensors as one list
        given = args[0] if args and isinstance(args[0], (tuple, list)) else args
        inputs = (*given, *kwargs.values())
        if not any(id(t) in self._followed for t in inputs) or not isinstance(out, Tensor):
            return
        if not out.is_floating_point() or out.ndim < 3:
            return
        pairs = [(t, self._origin(t)) for t in inputs if isinstance(t, Tensor)]
        source, origin = next(((t, o) for t, o in pairs if o is not None), (None, None))
        if source is None:
            return
        # a pattern stays one while its rows are reshaped, masked or dropped out
        if isinstance(origin, AttentionCall):
            if out.shape[:-1] == source.shape[:-1] or out.numel() == source.numel():
                self._mark(out, origin)
                fill = _fill(name, args, kwargs)
                if fill is not None and fill[1] == 0:  # closed behind the softmax
                    origin.closings += (_Closing(fill[0], out.shape, fill=-torch.inf),)
            return
        assert origin is not None
        # sums over keys and slices of them are no scores any more
        smaller = out.numel() < source.numel()
        if smaller or (out.shape[-1] < origin.n_keys and name != "reshape"):
            return
        # sums of products, as of position and content, are scores of several products
        products = {o.number: o for _, o in pairs if isinstance(o, _Product)}
        closings = origin.closings
        for number, other in products.items():
            # those of the first product are there already
            closings += other.closings if number != origin.number else ()
        closings += self._closings(name, args, kwargs, source, out.shape)
        n_products = origin.n_products + len(products) - 1
        self._mark(
            out,
            _Product(origin.q, origin.k, origin.n_keys, origin.number, closings, n_products),
        )

    def _closings(
        self, name: str, args: tuple[Any, ...], kwargs: Any, source: Tensor, shape: torch.Size
    ) -> tuple[_Closing, ...]:
        """Find what an operation on scores may have closed."""
        if name in ADDITIONS or name in _SUBTRACTIONS:
            sign = -1 if name in _SUBTRACTIONS else 1
            others = [t for t in args if isinstance(t, Tensor) and self._origin(t) is None]
            # the largest score of a row, which some models subtract, is no mask
            by_key = [t for t in others if t.ndim and t.shape[-1] > 1]
            return tuple(_Closing(t, shape, sign=sign) for t in by_key)
        fill = _fill(name, args, kwargs)
        if fill is not None:
            return (_Closing(fill[0], shape, fill=fill[1]),)
        if name == "where" and len(args) == 3:
            if args[0] is source:  # scores.where(open, value)
                return (_Closing(~args[1].bool(), shape, fill=args[2]),)
            is_first = args[1] is source
            where = ~args[0].bool() if is_first else args[0].bool()
            return (_Closing(where, shape, fill=args[2] if is_first else args[1]),)
        return ()

    # The places of an attention in sight

    def _product(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        operands = Operands(name, args, kwargs)
        left, right = operands.pair
        # products of vectors and matrices are no attention
        if not all(isinstance(t, Tensor) and t.ndim > 2 for t in (left, right)):
            return func(*args, **kwargs)
        # nor is it known what one of three tensors is
        if operands.equation and operands.equation.count(",") > 1:
            return func(*args, **kwargs)
        number = self.n_products
        self.n_products += 1
        # a pattern on the right: some models write values first
        swapped = isinstance(self._origin(right), AttentionCall)
        call = self._origin(right if swapped else left)
        # without an equation it is not known over which axis a pattern on the right is summed
        if isinstance(call, AttentionCall) and (operands.equation or not swapped):
            return self._values(func, operands, call, swapped)
        layout = Layout.parse_scores(operands.equation)
        if layout is None:
            return func(*args, **kwargs)
        q, k = layout.left(left), layout.right(right)
        # asked for by number, as the pass that opened the model counted
        if number in self.score_products:
            call = AttentionCall(self.score_products[number], "softmax", self.batch, number)
            new_q, new_k = self._show(call, "q", q), self._show(call, "k", k)
            # edited queries or keys go into the product in the layout that it expects
            if new_q is not q or new_k is not k:
                q, k = new_q, new_k
                operands.pair = layout.left_back(q), layout.right_back(k)
        out: Tensor = operands.run(func)
        if out.ndim > 2:
            # baddbmm adds its mask within the product, where no sum shows it
            base = operands.base
            closings = () if base is None else (_Closing(base, out.shape),)
            self._mark(out, _Product(q, k, out.shape[-1], number, closings))
        return out

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        # softmaxes over other axes (experts, vocabularies of one position) are no attention
        if scores.ndim < 3 or not scores.is_floating_point() or dim not in (-1, scores.ndim - 1):
            return func(*args, **kwargs)
        # counted whether or not somebody looks, as the anatomy knows an attention by its number
        number = self.n_attentions
        self.n_attentions += 1
        if not self._wants(number):
            return func(*args, **kwargs)
        call = AttentionCall(number, "softmax", self.batch, scores=scores)
        # scores that no product gave, such as learnt ones, have no queries and keys
        product = self._origin(scores)
        if isinstance(product, _Product):
            call.product, call.n_products = product.number, product.n_products
            # columns behind the keys are sinks, which belong to no key
            call.sinks = max(scores.shape[-1] - product.n_keys, 0)
            call.closings = product.closings
            # q and k were computed before it was known that their product is of attention
            if self._keeps:
                pair = {"q": product.q, "k": product.k}
                call.seen = {site: split_heads(t, self.batch) for site, t in pair.items()}
        edited = self._show(call, "scores", scores)
        # edited scores go on in the place of the model's
        if edited is not scores:
            args, kwargs = (
                ((edited, *args[1:]), kwargs) if args else (args, {**kwargs, "input": edited})
            )
        pattern = self._show(call, "pattern", func(*args, **kwargs))
        self._mark(pattern, call)
        return pattern

    def _values(self, func: Any, operands: Operands, call: AttentionCall, swapped: bool) -> Any:
        """Run the product of a pattern with values."""
        layout = Layout.parse_values(operands.equation, swapped)
        pattern, values = reversed(operands.pair) if swapped else operands.pair
        v = layout.right(values)
        # other products read a pattern as well, such as those of masks
        if v.shape[-2] not in (pattern.shape[-1], pattern.shape[-1] - call.sinks):
            return operands.run(func)
        call.is_read = True
        edited = self._show(call, "v", v)
        if edited is not v:
            values = layout.right_back(edited)
            operands.pair = (values, pattern) if swapped else (pattern, values)
        out = operands.run(func)
        z = layout.out(out)
        edited = self._show(call, "z", z)
        return out if edited is z else layout.out_back(edited)

    def _run_sdpa(self, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        """Run ``scaled_dot_product_attention``, in the open where somebody looks."""
        number = self.n_attentions
        self.n_attentions += 1
        # nobody looks, so the kernel runs as it is
        if not self._wants(number) and not _has_forward_derivatives(
            args[0] if args else kwargs["query"]
        ):
            return F.scaled_dot_product_attention(*args, **kwargs)
        bound = _SDPA.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        call = AttentionCall(number, "fused", self.batch, -1, n_products=1, is_read=True)
        q = self._show(call, "q", given["query"])
        k = self._show(call, "k", given["key"])
        v = self._show(call, "v", given["value"])
        # grouped keys: each serves several heads
        groups = 1
        if given["enable_gqa"] and k.shape[-3] != q.shape[-3]:
            groups, call.is_grouped = q.shape[-3] // k.shape[-3], True
        scale = given["scale"] if given["scale"] is not None else q.shape[-1] ** -0.5
        keys = _repeat(k, groups).transpose(-1, -2)
        # the kernel multiplies and sums in float32, whatever the precision
        is_half = q.dtype in (torch.float16, torch.bfloat16)
        scores = (q.float() * scale) @ keys.float() if is_half else (q * scale) @ keys
        scores, dead = _mask(call, scores, given["attn_mask"], given["is_causal"])
        call.scores = scores
        scores = self._show(call, "scores", scores)
        # rows without a key are NaN in softmax, and 0 in the kernel
        if dead is not None:
            scores = scores.masked_fill(dead, 0.0)
        pattern = scores.softmax(-1)
        if dead is not None:
            pattern = pattern.masked_fill(dead, 0.0)
        pattern = self._show(call, "pattern", pattern).to(v.dtype)
        if given["dropout_p"]:
            pattern = F.dropout(pattern, given["dropout_p"])
        z = pattern @ _repeat(v, groups)
        # how far our own attention is from the kernel's, which the anatomy reports
        if self._compares:
            fused = F.scaled_dot_product_attention(*args, **kwargs)
            call.distance = float((z - fused).abs().max())
        return self._show(call, "z", z)


def _fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any] | None:
    """Find where an operation fills a tensor, and with what; None for others."""
    if name not in _FILLS:
        return None
    where = args[1] if len(args) > 1 else kwargs["mask"]
    return where, args[2] if len(args) > 2 else kwargs["value"]


def _mask(
    call: AttentionCall, scores: Float[Tensor, "*batch query key"], mask: Any, is_causal: bool
) -> tuple[Float[Tensor, "*batch query key"], Bool[Tensor, "*batch query 1"] | None]:
    """Close keys as fused attention does; and find queries without any, to which it gives 0."""
    if is_causal:
        call.is_causal = True
        size = scores.shape[-2:]
        later = torch.ones(size, dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -torch.inf), None
    if mask is None:
        return scores, None
    # a mask of booleans says what is open; one of numbers is added
    if mask.dtype == torch.bool:
        call.closings = (_Closing(~mask, scores.shape, fill=-torch.inf),)
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        call.closings = (_Closing(mask, scores.shape),)
        scores = scores + mask
    return scores, (scores == -torch.inf).all(-1, keepdim=True)


def _repeat(tensor: Tensor, groups: int) -> Tensor:
    return tensor.repeat_interleave(groups, -3) if groups > 1 else tensor


def _has_forward_derivatives(tensor: Tensor) -> bool:
    """Say whether derivatives go forward through a tensor, which fused attention does not have."""
    is_wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_wrapped or forward_ad._current_level >= 0

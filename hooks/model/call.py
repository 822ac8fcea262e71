"""Calling a model and catching what its hook points show: the one place that does either."""

import inspect
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import bind_to_thread, eval_mode, modules_of
from infoflow_lens.hooks.model.inputs import Batch, example_input
from infoflow_lens.hooks.model.points import (
    TOKENS,
    cache_by_mode,
    config_value,
    hook_points,
    layer_of,
    reads_vectors,
    starts_at_layers,
)

AXES = (0, 1, 2)  # of batch, position and width in the states of blocks that may be left out
_BEHIND = ("ln_final", "unembed")  # hook points behind the blocks

_turns = threading.RLock()  # the forward of a block is replaced by one thread at a time


class BlockStarts:
    """The blocks of a model, and how each gives the states that leave it.

    Args:
        blocks: the modules, one a layer; a module that several layers share stands as often.

    Attributes:
        blocks: the same; empty where no pass may begin at any.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self._sizes: list[int | None] = []  # of the tuples that they give; 0 for states alone

    @classmethod
    def find(cls, model: nn.Module) -> "BlockStarts":
        """Find the blocks of an opened model; other models have none here."""
        anatomy: Any = getattr(model, "anatomy", None)
        blocks = [] if anatomy is None else anatomy.blocks
        is_usual = all(block.axes == AXES for block in blocks)
        return cls([block.module for block in blocks] if is_usual else [])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note in a pass how each block gives its states: alone, or first in a tuple of Nones.

        Where something else goes on beside the states, such as a bias of positions, no pass begins
        behind that block.
        """
        self._sizes = []

        def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            size = 0 if isinstance(out, Tensor) else None
            # other outputs, such as caches, would be wrong for a block that has not run
            if isinstance(out, tuple) and isinstance(out[0], Tensor):
                size = len(out) if all(part is None for part in out[1:]) else None
            self._sizes.append(size)

        with ExitStack() as stack:
            # a module that several layers share has one hook, which notes each of its calls
            for block in dict.fromkeys(self.blocks):
                stack.callback(block.register_forward_hook(bind_to_thread(note)).remove)
            yield
        if len(self._sizes) != len(self.blocks):  # some ran twice, or not at all
            self.blocks = []

    def can_start(self, layer: int) -> bool:
        """Say whether all blocks before a layer may be left out."""
        return layer <= len(self.blocks) and None not in self._sizes[:layer]

    @contextmanager
    def start_at(
        self, layer: int, states: Sequence[Float[Tensor, "_row pos d_model"]]
    ) -> Iterator[None]:
        """Run passes of this thread from a layer on.

        Args:
            layer: the first block that runs; their number for none.
            states: what each block before it gives; a single row stands for all that enter.
        """
        given = [*zip(self._sizes[:layer], states, strict=True)]
        # by call and not by module: a shared one gives other states in each of its layers
        order = iter([*given, *[None] * (len(self.blocks) - layer)])
        with ExitStack() as stack:
            if layer:
                stack.enter_context(_turns)
            for module in dict.fromkeys(self.blocks) if layer else ():
                own = vars(module).get("forward")
                # in its dictionary, as modules of a bridge hand attributes on to others
                vars(module)["forward"] = _Skip(module.forward, order, own)
                stack.callback(_restore, module, own)
            yield


def first_layer(points: Iterable[str]) -> int | None:
    """Find the lowest layer of hook points: -1 for what stands before the blocks, None for none."""
    layers = [layer_of(name) for name in points if not name.startswith(_BEHIND)]
    return min((-1 if layer is None else layer for layer in layers), default=None)


class _Skip:
    """The forward of a block that gives known states in passes of this thread, or runs.

    Args:
        forward: of the block.
        order: for the calls of all blocks, in turn: the size of the tuple that it gives, and the
            states; None to run.
        stands_for: what the module itself has in this place; None for that of its class.
    """

    def __init__(self, forward: Callable[..., Any], order: Iterator[Any], stands_for: Any) -> None:
        self._forward, self._order, self.stands_for = forward, order, stands_for
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give the states in as many rows as enter, or run."""
        # calls of other threads run as usual, and take no turn of this pass
        known = next(self._order, None) if threading.get_ident() == self._thread else None
        if known is None:
            return self._forward(*args, **kwargs)
        size, state = known
        if len(state) == 1:
            entered = next(t for t in (*args, *kwargs.values()) if is_stream(t))
            state = state[:, : entered.shape[1]].expand(len(entered), -1, -1)
        return (state, *[None] * (size - 1)) if size else state


def is_stream(value: Any) -> bool:
    """Say whether something that a block is called with may be its states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3


def _restore(module: nn.Module, own: Any) -> None:
    if own is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = own


@runtime_checkable
class HookFunction(Protocol):
    """A TransformerLens forward hook."""

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Look at an activation; return another to replace it."""
        ...


NamedHook = tuple[str, HookFunction]
Edits: TypeAlias = Mapping[str, HookFunction] | Iterable[NamedHook]


_EXAMPLE = 4  # tokens of the pass that shows how blocks give their states


class _AllSeenError(Exception):
    """Ends a forward pass once all that is wanted has been seen."""


@dataclass
class Caught:
    """What one call of a model showed.

    Attributes:
        activations: by hook point, detached unless the graph was asked for.
        output: what the call returned; None where it ended early.
    """

    activations: dict[str, Tensor] = field(default_factory=dict)
    output: Any = None
    _versions: dict[str, int] = field(default_factory=dict)

    def check_unwritten(self) -> None:
        """Refuse activations that were written after they were seen.

        Raises:
            InfoFlowError: naming the hook point.
        """
        for name, version in self._versions.items():
            if self.activations[name]._version != version:
                raise InfoFlowError(
                    f"{name} was written in place after its hooks had run, so what was seen there "
                    "is no longer what the model had: expected hooks that return a new tensor "
                    "(activation + v in the place of activation += v), and a model that does so"
                )


def call(
    model: nn.Module,
    batch: Batch | Tensor,
    want: Collection[str] = (),
    *,
    edit: Edits = (),
    start: tuple[str, Tensor] | None = None,
    output: bool = False,
    keep_graph: bool = False,
    may_end: bool | None = None,
) -> Caught:
    """Run a model on a batch, and catch what is wanted.

    The call ends as soon as all that is wanted has been seen, unless the output is wanted or hooks
    of the user's are on the model, which may stand further on. Attached probes do not see it.

    Args:
        model: a TransformerLens model, in the mode that the caller wants.
        batch: sequences; a mask goes with them where they are padded.
        want: hook points.
        edit: hooks that replace activations; they act before anything is caught.
        start: a hook point where the pass starts, ``hook_tokens``, ``hook_embed`` or
            ``blocks.l.hook_resid_pre``, and what enters there. A HookedTransformer runs from that
            layer on, and so does an opened model that nobody looks at before it; others run whole,
            with the activation replaced before the user's hooks act on it.
        output: whether the output is wanted.
        keep_graph: whether activations stay part of the graph of derivatives.
        may_end: whether the call may end early, where the caller knows; default, found out.

    Raises:
        InfoFlowError: for a pass with derivatives of a model whose weights allow none.
    """
    ends = not output and bool(want)
    if ends:
        ends = not has_user_hooks(model) if may_end is None else may_end
    edits = list(edit.items() if isinstance(edit, Mapping) else edit)
    layer = 0 if start is None else _layer_to_start(model, start[0], [*want, *dict(edits)])
    hidden: AbstractContextManager[None] = nullcontext()
    if keep_graph:  # hooks of hook points may take part in influence
        hidden = without_backward_hooks(model, set(hook_points(model).values()))
    with (
        mark_own_call(),
        hidden,
        catch(model, want, edits, ends=ends, keep_graph=keep_graph) as caught,
    ):
        try:
            caught.output = _call_model(model, batch, start, output, layer)
        except RuntimeError as error:
            if not str(error).startswith("Inference tensors cannot be saved"):
                raise
            raise InfoFlowError(
                "weights of the model were made inside torch.inference_mode(), and a pass with "
                "them has no derivatives: expected ordinary weights; make or load the model "
                "outside of that block"
            ) from error
    check_positions(model, caught.activations, batch.tokens if isinstance(batch, Batch) else batch)
    return caught


_BY_POSITION = {"hook_resid_pre": 1, "hook_pattern": 2, "hook_attn_scores": 2}  # and on which axis


def check_positions(model: nn.Module, activations: Mapping[str, Tensor], tokens: Tensor) -> None:
    """Refuse a pass of an opened model that shows more positions than there are token ids.

    Raises:
        InfoFlowError: naming the hook point, and the remedy.
    """
    if not hasattr(model, "anatomy") or tokens.ndim != 2 or tokens.is_floating_point():
        return
    for name, activation in activations.items():
        axis = _BY_POSITION.get(name.rpartition(".")[2])
        if axis is not None and activation.shape[axis] > tokens.shape[1]:
            raise InfoFlowError(
                f"{name} shows {activation.shape[axis]} positions, and {tokens.shape[1]} token ids "
                "were given, as where a learnt prompt stands before them: expected a position for "
                "each id; open the model behind the prompt, open_model(model.base_model), and "
                "inside of attach call it with inputs_embeds that begin with the prompt"
            )


def output_of(model: nn.Module, batch: Batch | Tensor) -> Any:
    """Return the output of a model on a batch, which attached probes do not see."""
    return call(model, batch, output=True).output


def run_few_tokens(
    model: nn.Module, want: Collection[str] = (), n_sequences: int = 1, n_pos: int = _EXAMPLE
) -> Caught:
    """Run a few random tokens, in evaluation mode and without hooks of the user's.

    Args:
        model: a TransformerLens model.
        want: hook points.
        n_sequences, n_pos: how many sequences, and tokens of each.
    """
    some = example_input(model, n_sequences)[:, :n_pos]
    with eval_mode(model), without_user_hooks(model):
        return call(model, some, want, output=True)


def _call_model(
    model: nn.Module,
    batch: Batch | Tensor,
    start: tuple[str, Tensor] | None,
    output: bool,
    layer: int,
) -> Any:
    """Run the model, from `start` on if it is given; blocks before `layer` may be left out."""
    whole = batch if isinstance(batch, Batch) else Batch(batch)
    if start is None:
        return whole.run(model)
    point, entering = start
    if point == TOKENS:
        return model(entering)
    if can_start(model) and not whole.columns:
        # TransformerLens skips the unembedding where no output is asked for
        kind = {} if output else {"return_type": None}
        return model(entering, start_at_layer=layer_of(point) or 0, **kind)
    points = hook_points(model)
    replace_start = bind_to_thread(lambda module, inputs: (entering,))
    handle = points[point].register_forward_pre_hook(replace_start, prepend=True)
    try:
        # nobody looks at what the blocks left out give, so the state that enters stands for each
        with block_starts(model).start_at(layer, [entering] * layer) if layer else nullcontext():
            # the blocks of an opened model see as many rows as they give
            if hasattr(model, "anatomy") and len(whole) == 1 < len(entering):
                whole = whole.take(torch.zeros(len(entering), dtype=torch.long))
            return whole.run(model, entering.device)
    finally:
        handle.remove()


def _layer_to_start(model: nn.Module, point: str, seen: Iterable[str]) -> int:
    """Return the block of an opened model at which a pass may begin; 0 where it has to run whole.

    It does where somebody looks at what stands before: `seen`, or hooks of the user's.
    """
    layer = (layer_of(point) or 0) if point.endswith(".hook_resid_pre") else 0
    lowest = first_layer(seen)
    if not layer or (lowest is not None and lowest < layer) or not hasattr(model, "anatomy"):
        return 0
    if has_user_hooks(model) or not block_starts(model).can_start(layer):
        return 0
    return layer


@cache_by_mode
def block_starts(model: nn.Module) -> BlockStarts:
    """Find how the blocks of an opened model give their states, by one short pass."""
    starts = BlockStarts.find(model)
    if (config_value(model, "d_vocab") or 0) < 1:  # no token ids to try it with
        starts.blocks = []
    if starts.blocks:
        with starts.watch():
            run_few_tokens(model)
    return starts


def can_start(model: nn.Module) -> bool:
    """Say whether a pass of the model can start at a layer, from its residual stream alone.

    Bridges cannot, and shortformer adds positions aside of the residual stream in every layer. Of
    opened models :func:`block_starts` says so.
    """
    kind = config_value(model, "positional_embedding_type")
    return starts_at_layers(model) and kind != "shortformer"


@cache_by_mode
def gives_logits(model: nn.Module) -> bool:
    """Say whether outputs are logits, of tokens or classes; encoders of sentences give states."""
    if reads_vectors(model):
        return False
    config: Any = getattr(getattr(model, "original_model", model), "config", None)
    n_logits = config_value(model, "d_vocab"), getattr(config, "num_labels", None)
    width = run_few_tokens(model).output.shape[-1]
    return width != config_value(model, "d_model") or width in n_logits


@cache_by_mode
def chooses_position(model: nn.Module) -> bool:
    """Say whether outputs are a number for each position, as where questions are answered."""
    if reads_vectors(model):
        return False
    shapes = [run_few_tokens(model, n_pos=n).output.shape for n in (_EXAMPLE, _EXAMPLE - 1)]
    return all(len(shape) == 2 for shape in shapes) and shapes[0][1] == shapes[1][1] + 1


@cache_by_mode
def count_choices_of_texts(model: nn.Module) -> int:
    """Count the numbers that outputs have for a text as a whole; 0 if they are by position."""
    if reads_vectors(model) or chooses_position(model):
        return 0
    shape = run_few_tokens(model).output.shape
    return shape[1] if len(shape) == 2 else 0


@contextmanager
def catch(
    model: nn.Module,
    want: Collection[str],
    edits: Iterable[NamedHook] = (),
    *,
    ends: bool = False,
    keep_graph: bool = False,
) -> Iterator[Caught]:
    """Catch what fires at hook points while the block runs; it may end once all has been seen.

    Hooks stand on the model for the length of the block only, and act on passes of this thread
    only: another thread may run the model meanwhile.
    """
    points = hook_points(model)
    caught, missing = Caught(), set(want)

    def keep(name: str) -> HookFunction:
        def hook_fn(activation: Tensor, hook: Any) -> None:
            if name in caught.activations:
                raise InfoFlowError(
                    f"{name} fired twice in one call of the {type(model).__name__}, so its layers "
                    "would be of different passes: expected one pass; a hook or a wrapper of yours "
                    "that runs the model again must run a copy of it"
                )
            if keep_graph:
                # derivatives go through it, so it stays in the graph
                caught.activations[name] = activation
            else:
                kept = activation.detach()
                caught.activations[name] = kept
                # tensors of inference mode have no version by which a later write shows
                if not kept.is_inference():
                    caught._versions[name] = kept._version
            missing.discard(name)
            # the pass need not go on: nobody looks at what comes behind
            if ends and not missing:
                raise _AllSeenError

        hook_fn.only_looks = True  # type: ignore[attr-defined]
        return hook_fn

    placed: list[tuple[Any, Any]] = []
    try:
        # edits come first, so that what is kept is what the model goes on with
        for name, hook_fn in (*edits, *((name, keep(name)) for name in want)):
            points[name].add_hook(bind_to_thread(hook_fn))
            placed.append((points[name], points[name].fwd_hooks[-1]))
        with suppress(_AllSeenError):
            yield caught
    finally:
        for point, handle in placed:
            handle.hook.remove()
            if handle in point.fwd_hooks:  # a hook of the user's may have reset them
                point.fwd_hooks.remove(handle)
    caught.check_unwritten()


def has_user_hooks(model: nn.Module) -> bool:
    """Say whether hooks stand on the model that no library below, nor this package, put there."""
    return any(True for _ in user_hooks(model))


def user_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield the user's own hooks on a model, each with its module.

    Hooks that a library or this package has put there are left out.
    """
    for module in modules_of(model):
        raw = {**module._forward_hooks, **module._forward_pre_hooks}
        if not raw:  # as nearly everywhere; this is asked before each pass that may end early
            continue
        for handle in getattr(module, "fwd_hooks", ()):
            placed, given = raw.pop(handle.hook.id, None), getattr(handle, "user_hook", None)
            # a permanent one of a hook point is a library's, where it says so
            if not handle.is_permanent or given is None or not _is_ours(given):
                # a hook point of TransformerLens 3 wraps the hook
                inner: Any = placed and inspect.getclosurevars(placed).nonlocals.get("hook")
                yield module, given or inner
        # what is left has no handle in a hook point's own list: hooks of torch itself
        for placed in raw.values():
            if hasattr(module, "fwd_hooks") or not _is_ours(placed):
                yield module, placed


def _is_ours(hook_fn: Any) -> bool:
    module = getattr(hook_fn, "__module__", None) or ""
    return module.startswith(("transformer_lens.", "transformers.", "infoflow_lens."))


# Calls of our own

_in_own_call: ContextVar[bool] = ContextVar("is_own_call", default=False)


@contextmanager
def mark_own_call() -> Iterator[None]:
    """Mark calls of models in this block as a probe's own: attached probes do not look at them."""
    token = _in_own_call.set(True)
    try:
        yield
    finally:
        _in_own_call.reset(token)


def is_own_call() -> bool:
    """Say whether a call of the model is a probe's own."""
    return _in_own_call.get()


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """Leave only the permanent hooks on a model (those that belong to it), for the block's length.

    Another thread that runs the model meanwhile has all of its forward hooks; backward hooks are
    off for it, too, where its backward pass begins within the block.
    """
    saved: list[tuple[Any, str, Any]] = []
    try:
        for point in set(hook_points(model).values()):
            for name, handles in (
                ("_forward_hooks", point.fwd_hooks),
                ("_backward_hooks", point.bwd_hooks),
                ("_backward_pre_hooks", ()),
            ):
                hooks = getattr(point, name)
                # hooks that belong to the model, such as those of an adapter, are part of it
                permanent = {handle.hook.id for handle in handles if handle.is_permanent}
                kept = OrderedDict(
                    # the user's hooks rest in this thread only, as another may run the model now
                    (key, hook_fn if key in permanent else bind_to_thread(hook_fn, elsewhere=True))
                    for key, hook_fn in hooks.items()
                    if key in permanent or name == "_forward_hooks"
                )
                saved.append((point, name, hooks))
                setattr(point, name, kept)
        yield
    finally:
        for point, name, hooks in saved:
            setattr(point, name, hooks)


@contextmanager
def without_backward_hooks(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Take off the user's backward hooks, which would see, or change, our gradients.

    A module that has one runs on copies of what it is given, which hooks of ours do not know.

    Args:
        model: the model.
        but: modules that keep theirs.
    """
    saved = [
        (module, module._backward_hooks, module._backward_pre_hooks)
        for module in modules_of(model)
        if (module._backward_hooks or module._backward_pre_hooks) and module not in but
    ]
    try:
        for module, *_ in saved:
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, hooks, pre_hooks in saved:
            module._backward_hooks, module._backward_pre_hooks = hooks, pre_hooks


@contextmanager
def ignore_edit_warnings() -> Iterator[None]:
    """Ignore warnings of edits: those in this block find out whether they reach the output.

    TransformerLens 4 warns of one that a bridge discards; who tries that sees it in the output.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message=r"A hook on [\s\S]* returned a modified tensor, but this attention delegates",
            category=UserWarning,
        )
        yield


@contextmanager
def restore_module_tensors(model: nn.Module) -> Iterator[None]:
    """Give modules back, after the block, the tensors that they keep between passes.

    Bridges keep the last pattern; one that is part of a derivative cannot be copied.
    """

    def is_tensor(value: object) -> bool:
        return isinstance(value, Tensor)

    before = [
        # attributes that are None count, too, as a pass may put a tensor there
        (vars(module), {k: v for k, v in vars(module).items() if v is None or is_tensor(v)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for values, kept in before:
            # tensors that were not there, then those that were replaced
            for name in [k for k, v in values.items() if is_tensor(v) and k not in kept]:
                del values[name]
            values.update(kept)

"""One call of a model, whose states and attentions are shown by TransformerLens's names.

:class:`SiteRun` is a tap with hooks of torch that say which block runs. Hooks stand on the model
while the call runs, in this thread alone. Names and shapes are those of TransformerLens; where a
model has something else they differ, and :func:`site_names` says which there are:

- ``hook_rot_q`` and ``hook_rot_k`` in the place of ``hook_q`` and ``hook_k`` where queries and keys
  are rotated, normed or scaled: what is shown is what their product reads;
- ``hook_attn_scores`` is -inf where the call closes a key, whatever the model puts there;
- ``hook_resid_mid`` is what the next sublayer reads, so behind the norm where that stands behind
  the sum, as in BERT, and ``hook_resid_post`` what leaves the block;
- a second attention of a block, such as cross attention, is ``attn_1``;
- ``hook_mixer_out`` is what a state space, a convolution or linear attention adds in a block that
  has no attention, or together with attention, as in Falcon-H1;
- ``hook_extra_out`` is what a third sublayer adds behind the MLP, as Gemma 4's per-layer inputs do.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import modules_of
from infoflow_lens.hooks.model.anatomy import Anatomy
from infoflow_lens.hooks.model.log import SAME, has_shape, tensors_in
from infoflow_lens.hooks.model.parts import Attention, Block, NormNumbers, Place
from infoflow_lens.hooks.model.tap import (
    ADDITIONS,
    NOTED,
    AttentionCall,
    Site,
    Tap,
    suspend_compiler,
)

Fire: TypeAlias = Callable[[str, Tensor], Tensor]

EMBED, POS_EMBED = "hook_embed", "hook_pos_embed"
SCALE, NORMALIZED = "ln_final.hook_scale", "ln_final.hook_normalized"
LOGITS_IN, LOGITS = "unembed.hook_in", "unembed.hook_out"
_NOTED = NOTED | SAME


def site_names(anatomy: Anatomy) -> list[str]:
    """List what can be shown of a model, in the order of the pass."""
    start, end = anatomy.start, anatomy.end
    names = [EMBED] if start.embed else []
    names += [POS_EMBED] if start.pos_embed else []
    for layer, block in enumerate(anatomy.blocks):
        names += [f"blocks.{layer}.{name}" for name in _block_names(block)]
    names += [SCALE, NORMALIZED] if end.norm else []
    return names + ([LOGITS_IN, LOGITS] if end.unembed else [])


def attention_name(number: int) -> str:
    """Name an attention of a block."""
    return "attn" if number == 0 else f"attn_{number}"


def _block_names(block: Block) -> list[str]:
    has = {
        _mixing_name(block): block.attn_out,
        "hook_resid_mid": block.mid,
        "mlp.hook_post": block.neurons,
        "hook_mlp_out": block.mlp_out,
        "hook_extra_out": block.extra_out,
    }
    names = ["hook_resid_pre"] if block.axes else []
    for number, found in enumerate(block.attentions):
        names += [f"{attention_name(number)}.{name}" for name in _point_names(found).values()]
    names += [name for name, place in has.items() if place is not None]
    return names + (["hook_resid_post"] if block.axes else [])


def _mixing_name(block: Block) -> str:
    """Name what attention adds, or what runs in its place or adds with it."""
    return "hook_attn_out" if block.attentions and not block.is_joined else "hook_mixer_out"


def _point_names(found: Attention) -> dict[Site, str]:
    """Name the hook points of an attention, by site."""
    names: dict[Site, str] = {}
    if found.product is not None:
        turn = "rot_" if found.is_rotated else ""
        names = {"q": f"hook_{turn}q", "k": f"hook_{turn}k"}
    others: dict[Site, str] = {"scores": "hook_attn_scores", "pattern": "hook_pattern"}
    return names | others | {"v": "hook_v", "z": "hook_z"}


class SiteRun(Tap):
    """Show what is asked for, of calls of a model, to `fire`.

    Args:
        model: the model.
        anatomy: of it.
        names: what is asked for, of :func:`site_names`.
        fire: gets the name and the tensor, and returns the tensor to go on with.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, names: Collection[str], fire: Fire
    ) -> None:
        super().__init__(watch=self._show_attention, wants=self._wants_attention)
        self._model, self._anatomy, self._blocks = model, anatomy, anatomy.blocks
        self._names, self._fire_point = set(names), fire
        self._thread = threading.get_ident()
        # looked up in every block, so by block once
        self._by_block: list[set[str]] = [set() for _ in self._blocks]
        for name in self._names:
            if name.startswith("blocks."):
                _, layer, rest = name.split(".", 2)
                self._by_block[int(layer)].add(rest)
        self._points = [
            {found.number: (n, found) for n, found in enumerate(block.attentions)}
            for block in self._blocks
        ]
        self._start_pass()

    def _start_pass(self) -> None:
        self._index, self._is_inside = -1, False
        self._shape: torch.Size | None = None  # of the stream in the block that runs
        # of the block: before attention's sum, behind it, at mid, behind the MLP's, behind a third
        self._stage = 0
        self._copies: dict[int, Tensor] = {}  # of the state that the next sum adds to
        self._sums = 0  # before the first block
        self._seen: set[int] = set()  # attentions of the block that have come
        # whether the next embedding is that of the ids; None where vectors are given in their place
        self._awaits_ids: bool | None = not self._anatomy.start.within

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Show calls of the model while the block runs.

        Raises:
            InfoFlowError: for gradient checkpointing, which runs blocks again, unseen.
        """
        _check_runs_once(self._model)
        # all hooks go off again, also where one of them could not be put on
        with ExitStack() as stack:

            def stand(place: str, how: str, hook: Callable[..., Any]) -> None:
                settings = {"with_kwargs": True} if how == "register_forward_pre_hook" else {}
                module = self._model.get_submodule(place)
                handle = getattr(module, how)(self._guard(hook), **settings)
                stack.callback(handle.remove)

            before, behind = "register_forward_pre_hook", "register_forward_hook"
            stand("", before, self._enter_model)
            # a block module may be in the list more than once, when its weights are shared
            for path in {block.path for block in self._blocks}:
                stand(path, before, self._enter)
                stand(path, behind, self._leave)
            for path in self._paths("output"):
                stand(path, behind, self._part_hook(path))
            for path in self._paths("input"):
                # neurons are what the last matrix of the MLP reads
                stand(path, before, self._neurons_hook(path))
            start, end = self._anatomy.start, self._anatomy.end
            if start.embed and {EMBED, POS_EMBED} & self._names:
                if start.within:
                    stand(start.within, before, self._await_ids)
                stand(start.embed, behind, self._embed)
            if end.norm and {SCALE, NORMALIZED} & self._names:
                stand(end.norm.path, behind, self._norm_hook(end.norm.numbers(self._model)))
            if end.unembed and {LOGITS_IN, LOGITS} & self._names:
                stand(end.unembed.path, before, self._enter_unembed)
                stand(end.unembed.path, behind, self._leave_unembed)
            with suspend_compiler(), self:
                # the tap sees functions of torch; hooks see modules: both are needed
                yield

    def _paths(self, kind: str) -> set[str]:
        """Find the modules whose inputs or outputs are states."""
        places = (
            place
            for block in self._blocks
            for place in (block.attn_out, block.mid, block.mlp_out, block.neurons)
        )
        return {place.path for place in places if place and place.kind == kind}

    def _guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Let a hook of torch see this thread alone."""

        def call_hook(*args: Any) -> Any:
            return hook(*args) if threading.get_ident() == self._thread else None

        return call_hook

    def _fire(self, name: str, tensor: Tensor) -> Tensor:
        before, self._is_aside = self._is_aside, True  # what hooks compute is no part of the model
        try:
            return self._fire_point(name, tensor)
        finally:
            self._is_aside = before

    # Before the first block, and behind the last

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._start_pass()
        is_first = next(iter(self._anatomy.stacks.values())) is self._blocks
        name = "inputs_embeds" if is_first else "decoder_inputs_embeds"
        given = kwargs.get(name)
        if not isinstance(given, Tensor) or self._anatomy.start.embed is None:
            return None
        self._awaits_ids = None
        return args, {**kwargs, name: self._show_embedding(given)}

    def _await_ids(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if self._awaits_ids is not None:
            self._awaits_ids = True

    def _embed(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        # other calls of the same module give no stream that enters the first block: later ones,
        # and those that embed what another stack reads, or types of tokens
        if self._index != -1 or self._is_inside or not self._awaits_ids:
            return None
        self._awaits_ids = False
        old = next(tensors_in(out))  # quantized embeddings give their scale with it
        return _swap(out, old, self._show_embedding(old))

    def _show_embedding(self, tensor: Tensor) -> Tensor:
        embedding = tensor
        # hooks get [batch, pos, width], and the model its own order of axes back
        if EMBED in self._names and self._anatomy.start.is_turned:
            turned = tensor.transpose(0, 1)
            answer = self._fire(EMBED, turned)
            embedding = tensor if answer is turned else answer.transpose(0, 1)
        elif EMBED in self._names:
            embedding = self._fire(EMBED, tensor)
        # from here on sums are looked at, as one of them adds the positions
        if POS_EMBED in self._names:
            self._copies = {id(embedding): embedding}
        return embedding

    def _is_last(self) -> bool:
        return not self._is_inside and self._index == len(self._blocks) - 1

    def _norm_hook(self, numbers: NormNumbers) -> Callable[..., Any]:
        def show(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor | None:
            if not self._is_last() or not args:
                return None
            new = out
            if SCALE in self._names:
                scale = numbers.scale(args[0], out)
                fired = self._fire(SCALE, scale)
                if fired is not scale:
                    # the scale divides all but the bias, so the ratio of both scales acts on that
                    new = (numbers.bias + (out - numbers.bias) * scale / fired).to(out.dtype)
            return self._fire(NORMALIZED, new) if NORMALIZED in self._names else new

        return show

    def _enter_unembed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not self._is_last() or LOGITS_IN not in self._names:
            return None
        return (self._fire(LOGITS_IN, args[0]), *args[1:]), kwargs

    def _leave_unembed(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Any:
        return self._fire(LOGITS, out) if self._is_last() and LOGITS in self._names else None

    # The states of a block

    @property
    def _block(self) -> Block:
        return self._blocks[self._index]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # a module that stands in several blocks is the next one of them, in order
        order = [*range(self._index + 1, len(self._blocks)), *range(self._index + 1)]
        self._index = next(i for i in order if self._blocks[i].module is module)
        self._is_inside, self._stage, self._copies, self._seen = True, 0, {}, set()
        # the anatomy counts attentions and products from the beginning of each block
        self.restart()
        block = self._block
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        given = [t for t in given if t.is_floating_point()]
        stream = next((t for t in given if t.ndim == 3), None)
        self.n_heads = block.attentions[0].n_heads if block.attentions else None
        # only products that somebody looks at are shown, so that others stay fused
        self.score_products = {
            found.product: found.number
            for n, found in enumerate(block.attentions)
            if found.product not in (None, -1) and self._looks_at(n, "q", "k")
        }
        if block.axes is None:
            self._shape, self.batch = None, len(given[0])
            return None
        # the stream is the first tensor [batch, pos, width]; without it no state can be shown
        if stream is None:
            raise InfoFlowError(
                f"no tensor [batch, pos, width] enters block {self._index} in this call: expected "
                "inputs like those with which the model was opened; open it again, with these as "
                "its example"
            )
        self._shape, self.batch = stream.shape, stream.shape[block.axes[0]]
        new = self._show_state("hook_resid_pre", stream)
        self._copies = {id(new): new}
        # an edit goes on in the place of the stream, whatever the argument was called
        if new is stream:
            return None
        args = tuple(new if t is stream else t for t in args)
        return args, {name: new if t is stream else t for name, t in kwargs.items()}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        self._is_inside = False
        self._check_attentions()
        return None if self._shape is None else self._show_part(out, "hook_resid_post")

    def _part_hook(self, path: str) -> Callable[..., Any]:
        """Show states that modules give."""

        def show(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            if not self._is_inside:
                return None
            block = self._block
            parts = {
                _mixing_name(block): block.attn_out,
                "hook_resid_mid": block.mid,
                "hook_mlp_out": block.mlp_out,
            }
            for name, place in parts.items():
                if place is not None and (place.kind, place.path) == ("output", path):
                    out = self._show_part(out, name, place)
                    if name == "hook_resid_mid":
                        # the sum of the MLP adds to this state, which hooks may have replaced
                        self._reach_mid(self._stream_of(out))
            return out

        return show

    def _neurons_hook(self, path: str) -> Callable[..., Any]:
        """Show what the last matrix of an MLP reads."""

        def show(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = self._block.neurons if self._is_inside else None
            if place is None or place.path != path or not args:
                return None
            return (self._show_state("mlp.hook_post", args[0]), *args[1:]), kwargs

        return show

    def _stream_of(self, out: Any) -> Tensor:
        return next(t for t in tensors_in(out) if t.shape == self._shape)

    def _show_part(self, out: Any, name: str, place: Place | None = None) -> Any:
        """Show the stream of what a module gives, and put what comes back in its place."""
        old = self._stream_of(out)
        return _swap(out, old, self._show_state(name, old, place))

    def _show_state(self, name: str, tensor: Tensor, place: Place | None = None) -> Tensor:
        """Show a state at a hook point of this block, as [batch, pos, width].

        Returns:
            What hooks made of it, in the axes of the model; the tensor itself if they did nothing.
        """
        if name not in self._by_block[self._index]:
            return tensor
        assert self._shape is not None
        axes = self._block.axes or (0, 1, 2)
        state = tensor
        if tensor.ndim == 2:  # batch and positions in one axis
            state = tensor.unflatten(0, tuple(self._shape[:2]))
        state = state.permute(axes) if axes != (0, 1, 2) else state
        state = state.clone() if place is not None and place.is_written else state
        answer = self._fire(f"blocks.{self._index}.{name}", state)
        if answer is state:
            return tensor
        # back to the model's order of axes, with batch and positions in one where it has them so
        return answer.permute([axes.index(axis) for axis in range(3)]).reshape(tensor.shape)

    def _reach_mid(self, state: Tensor) -> None:
        self._stage, self._copies = 2, {id(state): state}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self._is_aside or name not in _NOTED:
            return func(*args, **(kwargs or {}))
        # norms, dropout and casts of the state are still the state
        if name in SAME and args and id(args[0]) in self._copies:
            out = super().__torch_function__(func, types, args, kwargs)
            if isinstance(out, Tensor):
                self._copies[id(out)] = out
            return out
        # sums of the state with something: attention first, then the MLP
        if self._copies and name in ADDITIONS and len(args) > 1:
            if self._is_inside and self._adds_to_state(args):
                return self._sum(func, args)
            if self._index == -1 and self._adds_to_embedding(args):
                return self._embedding_sum(func, args)
        return super().__torch_function__(func, types, args, kwargs)

    def _adds_to_state(self, args: tuple[Any, ...]) -> bool:
        """Say whether the next sum of interest has come."""
        # a sum before attention has run is not the one that adds what attention gives; of another
        # mixer it is the first
        block = self._block
        place = {0: block.attn_out, 2: block.mlp_out, 3: block.extra_out}.get(self._stage)
        waits = self._stage == 0 and bool(block.attentions) and not self.n_attentions
        if place is None or place.kind != "sum" or waits:
            return False
        assert self._shape is not None
        return any(id(t) in self._copies for t in args[:2]) and all(
            isinstance(t, Tensor) and has_shape(t, self._shape) for t in args[:2]
        )

    def _sum(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        """Run the sum of a state with what attention or the MLP adds."""
        pair = list(args)
        # the summand that is not the state is what is shown
        place = 0 if id(args[1]) in self._copies else 1
        added = {0: _mixing_name(self._block), 2: "hook_mlp_out", 3: "hook_extra_out"}
        pair[place] = self._show_state(added[self._stage], pair[place])
        out: Tensor = func(*pair)
        # the first sum of a block ends attention, the next the MLP, and one more a third sublayer
        if self._stage == 0:
            self._stage = 1
            mid = self._block.mid
            if mid is not None and mid.kind == "sum":
                out = self._show_state("hook_resid_mid", out)
                self._reach_mid(out)
        else:
            self._stage, self._copies = self._stage + 1, {id(out): out}
        return out

    def _adds_to_embedding(self, args: tuple[Any, ...]) -> bool:
        return all(isinstance(t, Tensor) for t in args[:2]) and any(
            id(t) in self._copies for t in args[:2]
        )

    def _embedding_sum(self, func: Any, args: tuple[Any, ...]) -> Tensor:
        """Run a sum of the embedding with something else, which may be of positions."""
        pair, place = list(args), self._anatomy.start.pos_embed
        at = 0 if id(args[1]) in self._copies else 1
        if place is not None and place.number == self._sums:
            # positions without an axis of the batch are shown, and may be edited, for each sequence
            positions = pair[at].expand(pair[1 - at].shape)
            answer = self._fire(POS_EMBED, positions)
            pair[at] = pair[at] if answer is positions else answer
        self._sums += 1
        out: Tensor = func(*pair)
        self._copies[id(out)] = out
        return out

    # Attention

    def _looks_at(self, n: int, *sites: Site) -> bool:
        """Say whether some site of an attention of the block, or one of these, is asked for."""
        names = _point_names(self._block.attentions[n])
        wanted = [names[site] for site in sites if site in names] if sites else names.values()
        looks = self._by_block[self._index]
        return any(f"{attention_name(n)}.{name}" in looks for name in wanted)

    def _wants_attention(self, number: int) -> bool:
        if not self._is_inside or number not in self._points[self._index]:
            return False
        return self._looks_at(self._points[self._index][number][0])

    def _show_attention(self, call: AttentionCall, site: Site, tensor: Tensor) -> Tensor | None:
        if not self._is_inside or call.number not in self._points[self._index]:
            return None
        n, found = self._points[self._index][call.number]
        self._seen.add(n)
        if site == "scores":
            self._check_fits(call, n, found, tensor)
        name = f"{attention_name(n)}.{_point_names(found).get(site)}"
        if name not in self._by_block[self._index]:
            return None
        name = f"blocks.{self._index}.{name}"
        if site == "scores":
            closed = ~call.visible()
            closed = closed.reshape(tensor.shape) if closed.numel() == tensor.numel() else closed
            value = tensor.masked_fill(closed, -torch.inf)
            new = self._fire(name, value)
            # what stays closed has the number that the model gives it
            return None if new is value else torch.where(closed & (new == -torch.inf), tensor, new)
        if site == "pattern":
            return self._fire(name, tensor)
        # [batch, pos, head, d] as in TransformerLens; heads that a model repeats for each group of
        # queries are shown once, and repeated again behind the hook
        has_copies = site in ("k", "v") and tensor.shape[1] == found.n_heads
        copies = found.n_heads // found.n_kv_heads if has_copies else 1
        value = tensor[:, ::copies].transpose(1, 2)
        new = self._fire(name, value)
        # a model may add to z in place where no matrix reads it alone: it goes on with a copy
        if site == "z" and found.output is None:
            return new.transpose(1, 2).clone()
        return None if new is value else new.transpose(1, 2).repeat_interleave(copies, 1)

    def _check_fits(
        self, call: AttentionCall, n: int, found: Attention, scores: Float[Tensor, "..."]
    ) -> None:
        """Refuse an attention that is another one than the anatomy has.

        Raises:
            InfoFlowError: for other heads, or scores of another product.
        """
        if scores.shape[1] not in (found.n_heads, 1):
            raise self._misfit(f"has {scores.shape[1]} heads, and had {found.n_heads} then")
        product = found.product if found.how == "softmax" else -1
        if self._looks_at(n, "q", "k") and call.product != product:
            raise self._misfit("makes its scores by another product than then")

    def _check_attentions(self) -> None:
        """Refuse a block whose attentions are others than those of the anatomy.

        Raises:
            InfoFlowError: if their number differs, or one that is asked for was not seen.
        """
        block = self._block
        asked = {n for n in range(len(block.attentions)) if self._looks_at(n)}
        if asked and self.n_attentions != block.n_attentions:
            words = f"has {self.n_attentions} softmaxes or fused attentions"
            raise self._misfit(f"{words}, and had {block.n_attentions} then")
        if asked - self._seen:
            raise self._misfit("does not show its attention, and did so then")

    def _misfit(self, what: str) -> InfoFlowError:
        return InfoFlowError(
            f"block {self._index} ({self._block.path}) is not as it was when the model was opened: "
            f"it {what}; expected the same attention; open the model again, as it is now"
        )


def _check_runs_once(model: nn.Module) -> None:
    """Refuse gradient checkpointing.

    Raises:
        InfoFlowError: naming the module.
    """
    if torch.is_grad_enabled() and model.training:
        for module in modules_of(model):
            if getattr(module, "gradient_checkpointing", False) and module.training:
                raise InfoFlowError(
                    f"{type(module).__name__} has gradient checkpointing, which runs its blocks "
                    "again for the gradients, without what hooks change: expected one run; disable "
                    "it, or measure in eval mode"
                )


def _swap(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return the same structure with one tensor replaced by another."""
    if new is old:
        return value
    if value is old:
        return new
    if isinstance(value, dict):
        # outputs of transformers are dicts of a class of their own, made from fields by name
        made = {name: _swap(item, old, new) for name, item in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, (tuple, list)):
        return rebuild(value, [_swap(item, old, new) for item in value])
    return value


def rebuild(value: Sequence[Any], items: Sequence[Any]) -> Any:
    """Put items into a list, tuple or named tuple as `value` is one."""
    # a named tuple takes its fields one by one
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]

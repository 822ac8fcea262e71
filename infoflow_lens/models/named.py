"""Any Transformer under TransformerLens's names: hook points around the object as it is given.

:func:`open_model` finds the anatomy of a model and gives a :class:`NamedModel`, on which the tools
of TransformerLens work: run_with_cache, run_with_hooks, patching, head_detector, ActivationCache.
The model is not copied and not converted. It keeps its attention functions, adapters, precision and
mode; hooks of torch stand on it only while a call runs in which somebody looks.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import on_user_device, outside_user_modes
from infoflow_lens.foundation.naming import is_path
from infoflow_lens.hooks.model.anatomy import Anatomy, find_anatomy
from infoflow_lens.hooks.model.call import mark_own_call
from infoflow_lens.hooks.model.capabilities import takes_padding
from infoflow_lens.hooks.model.log import find_output
from infoflow_lens.hooks.model.parts import NormNumbers, Projection, run_forward
from infoflow_lens.hooks.model.points import hook_name
from infoflow_lens.hooks.model.sites import SiteRun, attention_name, site_names
from infoflow_lens.hooks.readouts import Pooling
from infoflow_lens.models.named_cache import NamedCache
from infoflow_lens.models.pooling import find_pooling

__all__ = ["NamedModel", "open_model"]

_MANY = 2**31 - 1  # positions, where nothing bounds them
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "act_fn")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")


class Part(nn.Module):
    """Hook points of a part of a model.

    Args:
        owner: the named model, which is no submodule of its parts.
    """

    _owner: Any

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.__dict__["_owner"] = owner

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self._owner.original_model
        return model

    @property
    def _anatomy(self) -> Anatomy:
        """The anatomy of the model as it is now."""
        self._owner.refresh()
        anatomy: Anatomy = self._owner.anatomy
        return anatomy

    def _matrix(self, found: Projection | None, what: str) -> Projection:
        if found is None:
            raise InfoFlowError(
                f"{self.name} has no {what}: expected a single matrix that is not followed by a "
                "norm or a gate, and reads nothing else"
            )
        return found


class AttentionPart(Part):
    """One attention.

    Args:
        owner: the named model.
        layer: of its block.
        number: among the attentions of the block.
    """

    def __init__(self, owner: Any, layer: int, number: int) -> None:
        super().__init__(owner)
        self._place = layer, number

    def _output(self) -> Projection:
        layer, number = self._place
        return self._matrix(self._anatomy.blocks[layer].attentions[number].output, "W_O")

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Read what each head's z is multiplied by.

        Raises:
            InfoFlowError: if no single matrix reads z.
        """
        layer, number = self._place
        weight = self._output().weight(self._model)
        n_heads = self._owner.anatomy.blocks[layer].attentions[number].n_heads
        return weight.reshape(n_heads, -1, weight.shape[1])

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Read what is added to that."""
        return self._output().bias(self._model)


class MLPPart(Part):
    """An MLP.

    Args:
        owner: the named model.
        layer: of its block.
    """

    def __init__(self, owner: Any, layer: int) -> None:
        super().__init__(owner)
        self._layer = layer

    def _output(self) -> Projection:
        return self._matrix(self._anatomy.blocks[self._layer].mlp_output, "W_out")

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Read what its neurons are multiplied by."""
        return self._output().weight(self._model)

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Read what is added to that."""
        return self._output().bias(self._model)


class FinalNorm(Part):
    """The norm behind the last block."""

    def numbers(self) -> NormNumbers:
        """Read its weight and bias, and whether it centers."""
        norm = self._anatomy.end.norm
        assert norm is not None  # else there is no such part
        return norm.numbers(self._model)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Norm a state, with a scale of its own."""
        norm = self._anatomy.end.norm
        assert norm is not None  # as before
        flat = run_forward(self._model.get_submodule(norm.path), x.flatten(0, -2))
        return flat.reshape(x.shape)


class UnembedPart(Part):
    """The matrix that makes logits."""

    def _output(self) -> Projection:
        return self._matrix(self._anatomy.end.unembed, "W_U")

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Read what the normed last state is multiplied by."""
        return self._output().weight(self._model)

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Read what is added to that."""
        return self._output().bias(self._model)


# Methods that ActivationCache asks for, of all models that are no HookedTransformer of its own


def find_directions(
    model: Any, tokens: str | int | Int[Tensor, "*places"]
) -> Float[Tensor, "*places d_model"]:
    """Return the directions whose products with the normed last state are logits.

    Args:
        model: with a matrix W_U.
        tokens: numbers of outputs, or a word that is one token; a single one gives a vector,
            whatever its shape.

    Raises:
        InfoFlowError: for a word without a tokenizer, and where there is no such matrix.
    """
    known = model.to_single_token(tokens) if isinstance(tokens, str) else tokens
    directions: Tensor = model.W_U.T
    ids = torch.as_tensor(known, device=directions.device)
    return directions[int(ids) if ids.numel() == 1 else ids]


def sum_biases(
    model: Any, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """Sum the output biases b_O and b_out of the layers below one, as TransformerLens's method.

    Args:
        model: a model with TransformerLens's names.
        layer: from 0 to the number of layers.
        mlp_input: whether b_O of the layer itself counts, too, as for the input of its MLP.
        include_mlp_biases: whether b_out counts.

    Raises:
        InfoFlowError: if attention or MLP of a block is no single linear map at its end.
    """
    total = torch.zeros(model.cfg.d_model, dtype=model.cfg.dtype, device=model.cfg.device)
    for number in range(layer + mlp_input):
        block = model.blocks[number]
        total = total + block.attn.b_O
        # of the last block the attention alone, where an MLP's input is asked for
        if include_mlp_biases and number < layer and "mlp" in block._modules:
            total = total + block.mlp.b_out
    return total


@outside_user_modes()
def open_model(
    model: nn.Module,
    tokenizer: Any = None,
    stack: str | None = None,
    *,
    example: Mapping[str, Any] | None = None,
) -> "NamedModel":
    """Open a model: any Transformer, under the names of TransformerLens.

    It is run twice on a few tokens to find its blocks, attentions and states, whatever its class.
    What is opened is the object itself: a model of transformers with any attention function, a
    PeftModel, the model inside a sentence transformer, a TransformerBridge, a module of your own.

    Args:
        model: the model.
        tokenizer: of texts that you give in the place of ids.
        stack: which list of blocks is meant, where there are several, such as "decoder".
        example: what its ``forward`` takes, by name: two sequences of a few tokens, equally long;
            default, token ids. Give pixel values or features to models that read these.

    Raises:
        InfoFlowError: for compiled code, attention that cannot be seen, several stacks, several
            devices or none, an example that the model does not take, what is no tokenizer, or other
            arguments beside a model that is opened already.
    """
    if isinstance(model, NamedModel):
        other_tokenizer = tokenizer is not None and tokenizer is not model.tokenizer
        other_stack = stack not in (None, model._stack)
        asked = {"tokenizer": other_tokenizer, "stack": other_stack, "example": example is not None}
        if any(asked.values()):
            names = " and ".join(name for name, is_other in asked.items() if is_other)
            raise InfoFlowError(
                f"the model is opened already, and another {names} is given: expected none, as it "
                "stays as it is; open what it was made of, open_model(model.original_model, ...)"
            )
        return model
    if not isinstance(model, nn.Module):
        raise InfoFlowError(
            f"the model is of type {type(model).__name__}: expected a module of PyTorch; load a "
            "name or a folder with load_any"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise InfoFlowError(
            f"tokenizer is a {type(tokenizer).__name__}: expected a tokenizer, as of transformers; "
            "give AutoTokenizer.from_pretrained(name or folder)"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InfoFlowError(
            f"the model is a {type(model).__name__}, which runs copies: expected the model itself; "
            "give its .module"
        )
    return NamedModel(model, tokenizer, stack, example)


class NamedModel(HookedRootModule):
    """A model under TransformerLens's names; see :func:`open_model`.

    Calls take what the model takes, or texts where there is a tokenizer, and give logits (the first
    tensor of its output where it has none), as TransformerLens's do. :meth:`lacks` says which hook
    points are not there, and why.

    Attributes:
        original_model: the model as it was given.
        anatomy: what it is made of.
        tokenizer: as it was given.
        cfg: the numbers that tools of TransformerLens read, from the anatomy and the tensors.
        blocks: hook points, block by block, with ``attn.W_O`` and ``mlp.W_out``.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        stack: str | None = None,
        example: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.original_model: Any = model
        self._stack = stack
        self._example = _token_example(model) if example is None else dict(example)
        self._padding: tuple[Anatomy | None, bool] = None, True
        self._build(self._find())

    @property
    def example_names(self) -> tuple[str, ...]:
        """The names of what its ``forward`` took when it was opened."""
        return tuple(self._example)

    def _move_example(self) -> dict[str, Any]:
        """Return the example on the model's device."""
        device = next((p.device for p in self.original_model.parameters()), torch.device("cpu"))
        return {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self._example.items()
        }

    def _find(self) -> Anatomy:
        with mark_own_call():
            return find_anatomy(self.original_model, self._move_example(), self._stack)

    def _build(self, anatomy: Anatomy) -> None:
        """Make the hook points of an anatomy."""
        self.anatomy = anatomy
        # points of an earlier anatomy must not stay beside those of this one
        for name in [name for name in self._modules if name != "original_model"]:
            del self._modules[name]
        self.blocks = nn.ModuleList(nn.Module() for _ in anatomy.blocks)
        for layer, block in enumerate(anatomy.blocks):
            for number in range(len(block.attentions)):
                part = AttentionPart(self, layer, number)
                self.blocks[layer].add_module(attention_name(number), part)
            if block.neurons is not None:
                self.blocks[layer].add_module("mlp", MLPPart(self, layer))
        if anatomy.end.norm is not None:
            self.ln_final = FinalNorm(self)
        if anatomy.end.unembed is not None:
            self.unembed = UnembedPart(self)
        for name in site_names(anatomy):
            parent, _, own = name.rpartition(".")
            self.get_submodule(parent).add_module(own, HookPoint())
        self.setup()
        self.cfg = _config(self)

    def setup(self) -> None:
        """Name the hook points; the modules of the model itself are left alone."""
        modules = dict(self.named_modules())
        own = [name for name in modules if name and not name.startswith("original_model")]
        self.mod_dict = {name: modules[name] for name in own}
        self.hook_dict = {n: m for n, m in self.mod_dict.items() if isinstance(m, HookPoint)}
        for name, module in self.mod_dict.items():
            module.name = name  # type: ignore[assignment]
            module.training = False  # hook points have no mode

    def lacks(self) -> dict[str, str]:
        """Say why hook points are not there, by their names."""
        reasons = {}
        for layer, block in enumerate(self.anatomy.blocks):
            names = {
                "attention": "attn",
                "attn_out": "hook_attn_out" if block.attentions else "hook_mixer_out",
                "mid": "hook_resid_mid",
                "neurons": "mlp.hook_post",
            }
            for part, why in block.lacks.items():
                if part != "adds":
                    reasons[f"blocks.{layer}.{names.get(part, f'hook_{part}')}"] = why
        return reasons

    # Running

    def forward(self, *args: Any, return_type: str | None = "logits", **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args, kwargs: what the model takes; a text, or texts, in the place of ids.
            return_type: "logits"; "output", what the model gives, as it is; or None for nothing.

        Raises:
            InfoFlowError: for another return type, for texts without a tokenizer, and for a model
                that is no longer what it was, so that hook points would show something else.
        """
        if return_type not in ("logits", "output", None):
            raise InfoFlowError(
                f"return_type is {return_type!r}: expected 'logits', 'output' or None; compute "
                "losses from these"
            )
        # a text, or a list of them
        some = args[0] if args and isinstance(args[0], list) else args[:1]
        if some and all(isinstance(text, str) for text in some):
            args, kwargs = args[1:], self._tokenize(args[0]) | kwargs
        with self.watch(), on_user_device():
            output = self.original_model(*args, **kwargs)
        if return_type == "logits":
            return find_output(output)
        return output if return_type == "output" else None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does; hook points fire in each of its passes."""
        with self.watch(), on_user_device():
            return self.original_model.generate(*args, **kwargs)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Let hook points fire in all calls of the model itself, in this thread, for a block.

        Hooks are to be on the points before it begins.

        Raises:
            InfoFlowError: as :meth:`forward` does.
        """
        self.refresh()
        points = self.hook_dict
        names = [name for name, point in points.items() if _has_hooks(point)]
        # nobody looks, so no hooks of torch need to stand on the model
        if not names:
            yield
            return

        def fire(name: str, tensor: Tensor) -> Tensor:
            answer: Tensor = points[name](tensor)
            return answer

        with SiteRun(self.original_model, self.anatomy, names, fire).watch():
            yield

    def refresh(self) -> None:
        """Find the anatomy anew where the model has changed: modules, functions, precision.

        Raises:
            InfoFlowError: if the model has other hook points by now, and hooks stand on the old.
        """
        if self.anatomy.holds(self.original_model):
            return
        anatomy = self._find()
        before, after = site_names(self.anatomy), site_names(anatomy)
        # hooks on points of the same names stay where they are
        if before == after:
            self.anatomy = anatomy
            self.cfg = _config(self)
        elif any(map(_has_hooks, self.hook_dict.values())):
            changed = sorted(set(before) ^ set(after))
            raise InfoFlowError(
                f"the model has changed, and with it its hook points ({', '.join(changed[:3])}): "
                "expected no hooks on them meanwhile; take them off, or open the model again"
            )
        else:
            self._build(anatomy)

    @contextmanager
    def hooks(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Put hooks on hook points for a block, as in TransformerLens.

        Raises:
            InfoFlowError: for a name of no hook point, with the reason; and as :meth:`forward`.
        """
        self.refresh()
        given = dict(zip(("fwd_hooks", "bwd_hooks"), args)) | kwargs
        for name, _ in (*given.get("fwd_hooks", ()), *given.get("bwd_hooks", ())):
            if isinstance(name, str):  # else a function of names
                hook_name(self, name)
        with super().hooks(*args, **kwargs) as model:
            yield model

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model and keep what it shows, as in TransformerLens.

        Returns:
            The logits, and a :class:`NamedCache`, or a dictionary where that is asked for.
        """
        self.refresh()  # before hooks stand on points that may go
        output, activations = super().run_with_cache(
            *model_args, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if not return_cache_object:
            return output, activations
        return output, NamedCache(activations, self, has_batch_dim=not remove_batch_dim)

    @property
    def training(self) -> bool:
        """The mode of the model itself."""
        return "original_model" in self._modules and self.original_model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Note what torch sets when a module is made; the mode stays the model's."""
        vars(self)["training"] = mode

    @property
    def takes_padding(self) -> bool:
        """Say whether sequences show in a padded batch, with a mask, what each shows alone.

        A few tokens are run to find out, once for an anatomy.
        """
        self.refresh()
        known, answer = self._padding
        if known is not self.anatomy:
            answer = takes_padding(self.original_model, self.anatomy, self._move_example())
            self._padding = self.anatomy, answer
        return answer

    @property
    def pooling(self) -> Pooling | None:
        """The way from last states to the embedding of a text, where the model's folder says so.

        Raises:
            InfoFlowError: for what :class:`~infoflow_lens.hooks.EmbeddingCosine` does not have.
        """
        place = getattr(self.original_model, "name_or_path", None)
        return find_pooling(Path(place)) if place and is_path(place) else None

    # Texts

    def _tokenize(self, texts: str | Sequence[str]) -> dict[str, Any]:
        """Make of texts what the model takes, padded where they differ in length.

        Raises:
            InfoFlowError: without a tokenizer.
        """
        if self.tokenizer is None:
            raise InfoFlowError(
                f"the model has no tokenizer for {texts!r:.40}: expected token ids; or give a "
                "tokenizer, open_model(model, tokenizer=...)"
            )
        many = [texts] if isinstance(texts, str) else list(texts)
        made = self.tokenizer(many, return_tensors="pt", padding=len(many) > 1, verbose=False)
        return {name: value.to(self.cfg.device) for name, value in made.items()}

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        truncate: bool = True,
        **ignored: Any,
    ) -> Int[Tensor, "batch pos"]:
        """Make token ids of texts, as the tokenizer does.

        Args:
            input: a text, or several, which are padded where they differ in length.
            prepend_bos: False to leave out the first token that the tokenizer adds.
            truncate: whether to cut them to as many as the model takes.
            ignored: other arguments of TransformerLens.

        Raises:
            InfoFlowError: without a tokenizer.
        """
        made = self._tokenize(input)
        ids: Tensor = made["input_ids"]
        if prepend_bos is False and self.cfg.tokenizer_prepends_bos:
            # padding may stand before the first token of a shorter text
            real = made.get("attention_mask", torch.ones_like(ids))
            first = real.argmax(dim=1, keepdim=True)
            others = torch.arange(ids.shape[1], device=ids.device) != first
            ids = ids[others].view(len(ids), -1)
        return ids[:, : self.cfg.n_ctx] if truncate else ids

    def to_string(self, tokens: Any) -> str | list[str]:
        """Make a text of ids [pos], or one of each row of ids [batch, pos].

        Raises:
            InfoFlowError: without a tokenizer.
        """
        if self.tokenizer is None:
            raise InfoFlowError(
                "the model has no tokenizer to turn ids into text: give one, "
                "open_model(model, tokenizer=...)"
            )
        ids = torch.as_tensor(tokens)
        texts: list[str] = self.tokenizer.batch_decode(ids if ids.ndim > 1 else ids.reshape(1, -1))
        return texts if ids.ndim > 1 else texts[0]

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> list[str]:
        """Make of a text, or of ids [pos] or [1, pos], the text of each token.

        Raises:
            InfoFlowError: without a tokenizer.
        """
        ids = self.to_tokens(input, prepend_bos) if isinstance(input, str) else input
        return [str(self.to_string([i])) for i in torch.as_tensor(ids).flatten().tolist()]

    def to_single_token(self, text: str) -> int:
        """Return the id of a text that is one token.

        Raises:
            InfoFlowError: for several, and without a tokenizer.
        """
        # for its error where there is no tokenizer
        self._tokenize(text)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise InfoFlowError(f"{text!r} is {len(ids)} tokens: expected one; give its id")
        return int(ids[0])

    # What ActivationCache asks for

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Read what the normed last state is multiplied by.

        Raises:
            InfoFlowError: if no single matrix makes the output of it.
        """
        if "unembed" not in self._modules or not self.anatomy.end.gives_output:
            raise InfoFlowError(
                f"the output of {type(self.original_model).__name__} is not the last state, normed "
                "and multiplied by one matrix (it has no such head, or scales or caps what that "
                "gives): expected such a model; take gradients of the output"
            )
        weight: Tensor = self.unembed.W_U
        return weight

    accumulated_bias = sum_biases
    tokens_to_residual_directions = find_directions


def _has_hooks(point: nn.Module) -> bool:
    return bool(point._forward_hooks or point._backward_hooks or point._forward_pre_hooks)


def _token_example(model: nn.Module) -> dict[str, Tensor]:
    """Return token ids [2, pos] that the model knows, by the name of its first argument."""
    embedding = None
    with suppress(NotImplementedError):  # models of pictures and series have none
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(embedding, "weight", None)
    config = getattr(model, "config", None) or getattr(model, "cfg", None)
    n_ids = getattr(config, "vocab_size", getattr(config, "d_vocab", None))
    if isinstance(weight, Tensor):
        n_ids = len(weight)
    n_ids = n_ids if isinstance(n_ids, int) and n_ids > 0 else 14
    first = min(3, max(0, n_ids - 11))  # behind ids of padding, where there are
    # a Nystromformer with landmarks runs on texts of one length
    n_pos = getattr(config, "segment_means_seq_len", 7)
    n_pos = 7 if getattr(config, "num_landmarks", None) == n_pos else n_pos
    ids = torch.arange(2 * n_pos).reshape(2, n_pos) % min(11, n_ids) + first
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    example = {next((n for n in ("input_ids", *names[:1]) if n in names), "input_ids"): ids}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        example["decoder_input_ids"] = ids
    return example


def _config(named: NamedModel) -> SimpleNamespace:
    """Collect the numbers that tools read: from the anatomy; the config only bounds positions."""
    anatomy, model = named.anatomy, named.original_model
    # of layers that differ, the first: tools that read sizes here expect one number
    attentions = [block.attentions[0] for block in anatomy.blocks if block.attentions]
    widths = [block.mlp_output.d_in for block in anatomy.blocks if block.mlp_output]
    first = next(iter(model.parameters()), torch.empty(0))
    own = getattr(model, "config", None) or getattr(model, "cfg", None)
    lengths = [getattr(own, name, None) for name in _LENGTHS]
    bounds = [n for n in (anatomy.start.n_ctx, *lengths) if isinstance(n, int) and n > 0]
    norm = None if anatomy.end.norm is None else anatomy.end.norm.numbers(model)
    bos = _prepends(named.tokenizer)
    return SimpleNamespace(
        model_name=type(model).__name__,
        original_architecture=type(model).__name__,
        n_layers=len(anatomy.blocks),
        n_heads=attentions[0].n_heads,
        n_key_value_heads=attentions[0].n_kv_heads,
        d_head=attentions[0].d_head,
        d_model=anatomy.d_model,
        d_mlp=widths[0] if widths else None,
        d_vocab=anatomy.start.d_vocab or getattr(own, "d_vocab", None),  # a bridge says it
        n_ctx=min(bounds, default=_MANY),
        act_fn=next((a for n in _ACTIVATIONS if (a := getattr(own, n, None)) is not None), None),
        attention_dir="causal" if all(a.is_causal for a in attentions) else "bidirectional",
        attn_only=all(block.mlp_out is None for block in anatomy.blocks),
        normalization_type=None if norm is None else "LN" if norm.centers else "RMS",
        device=first.device,
        dtype=first.dtype,
        default_prepend_bos=bos,
        tokenizer_prepends_bos=bos,
        tokenizer_appends_eos=False,
    )


def _prepends(tokenizer: Any) -> bool:
    """Say whether a tokenizer begins each text with a token of its own."""
    if tokenizer is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0] in tokenizer.all_special_ids

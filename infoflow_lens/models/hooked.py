"""The hosted Transformer: one implementation for TransformerLens 3 and 4.

TransformerLens 4 has no HookedTransformer; it keeps what that is made of, HookedRootModule and
HookPoint, for modules of one's own. These are such modules. They have HookedTransformer's hook
points, in its order of firing, its parameters, in its order (a seed and an optimiser's state go by
it), and its operations, so that every number has the same bits; ``tests/reference/frozen.py`` keeps
those of TransformerLens 3.9. Where HookedTransformer exists, a :class:`HookedModel` is one, with a
HookedTransformerConfig; where it does not, it is a HookedRootModule with a TransformerBridgeConfig.

Beyond HookedTransformer, layers have head counts of their own, keys can be hidden from all queries,
and `cfg` follows the tensors in device and precision.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import (
    init_kaiming_normal_,
    init_kaiming_uniform_,
    init_xavier_normal_,
    init_xavier_uniform_,
)

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.naming import check_known
from infoflow_lens.models.blocks import Attention, Block, LayerNorm, PositionalEmbed, Unembed
from infoflow_lens.models.named import find_directions, sum_biases

HAS_HOOKED_TRANSFORMER = importlib.util.find_spec("transformer_lens.HookedTransformer") is not None
"""Whether the installed TransformerLens is of version 3."""

if TYPE_CHECKING:
    _Base = HookedRootModule
elif HAS_HOOKED_TRANSFORMER:
    _Base = importlib.import_module("transformer_lens").HookedTransformer
else:
    _Base = HookedRootModule

_INITIALISATIONS: dict[str, Callable[[Tensor, float], Any]] = {
    "gpt2": lambda weight, deviation: nn.init.normal_(weight, std=deviation),
    "xavier_uniform": lambda weight, gain: init_xavier_uniform_(weight, gain=gain),
    "xavier_normal": lambda weight, gain: init_xavier_normal_(weight, gain=gain),
    "kaiming_uniform": lambda weight, gain: init_kaiming_uniform_(weight, gain=gain),
    "kaiming_normal": lambda weight, gain: init_kaiming_normal_(weight, gain=gain),
}


def make_config(**settings: Any) -> Any:
    """Return the config of TransformerLens that goes with a hosted model.

    A HookedTransformerConfig where it exists, else a TransformerBridgeConfig, which has the same
    names; with both, sizes are those of the first layer.
    """
    name = "HookedTransformerConfig" if HAS_HOOKED_TRANSFORMER else "TransformerBridgeConfig"
    config = getattr(importlib.import_module("transformer_lens"), name)(**settings)
    if config.use_attn_scale and config.attn_scale == -1.0:
        config.attn_scale = np.sqrt(config.d_head)  # which version 4 leaves to its adapters
    return config


class MixedHeadsCache(ActivationCache):
    """A cache of layers with different head counts: methods that assume one count are refused."""

    def stack_head_results(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to stack heads' results, which takes one number of heads for all layers.

        Raises:
            InfoFlowError: always.
        """
        model: Any = self.model
        raise InfoFlowError(
            "stack_head_results takes the number of heads from cfg.n_heads for every layer, but "
            f"this model's layers have {model.heads_of_layers}: expected equal counts; "
            "stack layer by layer from hook_z and W_O"
        )


def _parameter_of(module: str, name: str, what: str) -> property:
    """Return a parameter of the model, as an attribute of it."""
    return property(lambda model: getattr(getattr(model, module), name), doc=f"{name} {what}.")


def _stack_layers(part: str, name: str, shape: str) -> property:
    """Stack a parameter of all blocks; reading it raises an InfoFlowError where it cannot be."""

    def stack(model: Any) -> Tensor:
        if part == "mlp" and model.cfg.attn_only:
            raise InfoFlowError(
                f"the model is attention-only and has no {name}: expected a model with d_mlp"
            )
        tensors = [getattr(getattr(block, part), name) for block in model.blocks]
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InfoFlowError(
                f"{name} has a shape of its own in each layer ({shapes}) and cannot be stacked: "
                f"read it layer by layer, as model.blocks[layer].{part}.{name}"
            )
        return torch.stack(tensors)

    return property(stack, doc=f"{name} of all layers, {shape}.")


def _setter(flag: str, doc: str) -> Callable[[Any, bool], None]:
    """Return a method that sets a flag of the config."""

    def set_flag(model: Any, value: bool) -> None:
        setattr(model.cfg, flag, value)

    set_flag.__doc__ = doc
    return set_flag


_ARGUMENTS = ("return_type", "start_at_layer", "stop_at_layer", "attention_mask", "past_kv_cache")
# HookedTransformer's forward takes them; they are about text, or about other kinds of positions
_ABOUT_TEXT = ("loss_per_token", "prepend_bos", "padding_side", "tokens", "shortformer_pos_embed")
# Hook points that fire where a flag of the config asks for them
_FLAGS = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}


class HookedModel(_Base):
    """A Transformer with hook points, of which layers may have different numbers of heads.

    What HookedTransformer offers beside loading and text works on it: run_with_cache,
    run_with_hooks, hooks, partial runs, stacked weights, the methods of ActivationCache, patching.

    Options of the model are flags of `cfg`: ``use_attn_result``, ``use_split_qkv_input``,
    ``use_attn_in`` and ``use_hook_mlp_in`` say which hook points fire (set each by its ``set_``
    method), ``use_hook_tokens`` whether the input fires ``hook_tokens``, ``attn_only`` whether
    blocks have no MLP, and ``normalization_type`` None whether there are no layer norms.

    Args:
        cfg: see :func:`make_config`.
        embed: a module from the input to [batch, pos, d_model].
        attention: an :class:`Attention` for each layer.

    Attributes:
        reads_vectors: whether the input is vector tokens, [batch, pos, d_token], and the output
            is read at CLS; else the input is token ids, [batch, pos].
        architecture: the sizes of the model, which save_model writes beside its weights.
        tokenizer: None, as hosted models read no text.
        blocks: the :class:`Block` of each layer.
    """

    reads_vectors = False  # else hook_tokens carries the input vectors, and CLS is read
    architecture: Any
    tokenizer: Any
    blocks: Any

    def __init__(self, cfg: Any, embed: nn.Module, attention: list[Attention]) -> None:
        HookedRootModule.__init__(self)  # HookedTransformer would build its own blocks
        self.cfg = cfg
        self.tokenizer = None
        self.dataset = None
        self.embed: Any = embed
        self.hook_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.positional_embedding_type == "standard":
            self.pos_embed = PositionalEmbed(cfg)
            self.hook_pos_embed = HookPoint()  # [batch, pos, d_model]
        if cfg.use_hook_tokens:
            self.hook_tokens = HookPoint()
        self.blocks = nn.ModuleList([Block(cfg, attn) for attn in attention])
        if cfg.normalization_type is not None:
            self.ln_final = LayerNorm(cfg)
        self.unembed = Unembed(cfg)
        self.setup()

    # Running

    def check_input(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse what is no batch of this model's tokens.

        Raises:
            InfoFlowError: with what was expected.
        """
        raise NotImplementedError

    def forward(
        self,
        input: Tensor,
        return_type: str | None = "logits",
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        past_kv_cache: Any = None,
        **ignored: Any,
    ) -> Tensor | None:
        """Run the model.

        Args:
            input: vector tokens [batch, pos, d_token]; or token ids [batch, pos], [pos] for one
                sequence; with `start_at_layer`, the residual stream that enters that layer.
            return_type: "logits", or None for nothing.
            start_at_layer: the first layer to run; None for all layers and the embedding.
            stop_at_layer: the layer before which to stop, negative from the last backwards; then
                the residual stream, [batch, pos, d_model], is returned.
            attention_mask: of token ids, 0 for padding, which is no key for any query; positions
                count from the first token. With `start_at_layer`, give it again.
            past_kv_cache: None; earlier positions depend on later ones.
            ignored: arguments of HookedTransformer that change nothing here: loss_per_token,
                prepend_bos, padding_side, tokens, shortformer_pos_embed.

        Returns:
            For vector tokens the output read at CLS, [batch, d_output] (eq 2); for token ids the
            logits of all positions, [batch, pos, d_output].

        Raises:
            InfoFlowError: for input of a wrong kind, shape or precision, a loss as return type, a
                mask over vector tokens, or an unknown argument.
        """
        if return_type not in ("logits", None):
            raise InfoFlowError(
                f"return_type is {return_type!r}: a hosted model has no next-token loss; expected "
                "'logits', which you compare with the target, or None"
            )
        if past_kv_cache is not None:
            raise InfoFlowError(
                "past_kv_cache is given, but the model is bidirectional: earlier positions depend "
                "on later ones; expected None, and the whole sequence"
            )
        if attention_mask is not None:
            if self.reads_vectors:
                raise InfoFlowError(
                    "attention_mask is given, but vector tokens take no attention_mask: every "
                    f"sequence has {self.architecture.n_tokens} tokens; leave it out"
                )
            attention_mask = attention_mask.to(self.unembed.W_U.device)
        # arguments of other models of TransformerLens that change nothing here are taken
        check_known(ignored, (*_ARGUMENTS, *_ABOUT_TEXT), "forward", "argument")
        residual = self.embedded(input, attention_mask) if start_at_layer is None else input
        residual = self.run_layers(residual, start_at_layer, stop_at_layer, attention_mask)
        if stop_at_layer is not None:
            return residual
        output = self.read_out(residual)
        if return_type is None:
            return None
        return output[:, -1] if self.reads_vectors else output

    def forward_readout(self, x: Tensor) -> Float[Tensor, "batch d_output"]:
        """Compute the output at the last position alone, faster: the last block runs only there.

        Its numbers are those of ``model(x)`` for vector tokens, read at CLS (eq 2), and those of
        ``model(x)[:, -1]`` for token ids. Hooks of the last block see a single query here: probe
        ``model(x)`` instead.
        """
        residual = self.run_layers(self.embedded(x), stop=-1)
        return self.read_out(self.blocks[-1].run_last_position(residual))[:, 0]

    def embedded(
        self, x: Tensor, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that enters the first block.

        Args:
            x: vector tokens [batch, pos, d_token]; or token ids [batch, pos], [pos] for one
                sequence.
            attention_mask: of token ids, [batch, pos], 0 for padding.

        Raises:
            InfoFlowError: for input of a wrong kind, shape or precision.
        """
        if isinstance(x, Tensor) and x.ndim == 1 and not self.reads_vectors:
            x = x[None]
        self.check_input(x, attention_mask)
        x = x.to(self.embed.W_E.device)
        if self.cfg.use_hook_tokens:
            x = self.hook_tokens(x)
        embedded: Tensor = self.hook_embed(self.embed(x))
        if self.cfg.positional_embedding_type == "standard":
            # the embedding has appended CLS by now, which has a position of its own
            positions = self.pos_embed(*embedded.shape[:2], attention_mask)
            embedded = embedded + self.hook_pos_embed(positions)
        return embedded

    def run_layers(
        self,
        residual: Float[Tensor, "batch pos d_model"],
        start: int | None = None,
        stop: int | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream after the blocks from `start` up to, but not with, `stop`.

        Args:
            residual: what enters block `start`.
            start: the first block; None for 0.
            stop: the block before which to stop, negative from the last backwards; None for all.
            attention_mask: [batch, pos], 0 for padding, which is no key for any query.
        """
        for block in list(self.blocks)[start:stop]:
            residual = block(residual, attention_mask)
        return residual

    def read_out(
        self, residual: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_output"]:
        """Return the output at every position of a residual stream that has passed all blocks."""
        if self.cfg.normalization_type is not None:
            residual = self.ln_final(residual)
        output: Tensor = self.unembed(residual)
        return output

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run as TransformerLens does, and return the output with a cache of activations.

        Args:
            model_args: the input, and what else :meth:`forward` takes by position.
            return_cache_object: whether the cache is an ActivationCache, a `MixedHeadsCache` for
                layers of different head counts; else it is a dict.
            remove_batch_dim: whether activations of a batch of one sequence lose the first axis.
            kwargs: names_filter and other options of TransformerLens; the rest goes to `forward`.
        """
        # past HookedTransformer's own, which makes the same kind of cache for every model
        output, activations = HookedRootModule.run_with_cache(
            self, *model_args, remove_batch_dim=remove_batch_dim, **kwargs
        )
        if not return_cache_object:
            return output, activations
        mixed = len(set(self.heads_of_layers)) > 1
        cache = (MixedHeadsCache if mixed else ActivationCache)(
            activations, self, has_batch_dim=not remove_batch_dim
        )
        return output, cache

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Any,
        dir: Any = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Refuse hooks that would never fire.

        Args:
            hook_point_name: the hook point, whose flag in the config is asked.
            hook_point, hook, dir, is_permanent, prepend: as HookedTransformer calls it; not read.

        Raises:
            InfoFlowError: for a hook point whose flag is not set.
        """
        for ending, flag in _FLAGS.items():
            if hook_point_name.endswith(ending) and not getattr(self.cfg, flag):
                raise InfoFlowError(
                    f"{hook_point_name} does not fire while cfg.{flag} is False: call "
                    f"model.set_{flag}(True) first"
                )

    # Device, precision, weights

    def to(self, *args: Any, print_details: bool = False, **kwargs: Any) -> Any:
        """Move as ``nn.Module.to``; `print_details` of HookedTransformer changes nothing."""
        return nn.Module.to(self, *args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Any:
        """Move to a GPU, as ``nn.Module.cuda``; None for the current one."""
        return nn.Module.cuda(self, device)

    def cpu(self) -> Any:
        """Move to the CPU, as ``nn.Module.cpu``."""
        return nn.Module.cpu(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move the config with the tensors, whatever moves these (to, cuda, double, ...)."""
        nn.Module._apply(self, *args, **kwargs)
        weight = self.unembed.W_U
        self.cfg.device, self.cfg.dtype = str(weight.device), weight.dtype
        return self

    def init_weights(self) -> None:
        """Draw all weight matrices by ``cfg.init_mode``, in parameters' order; biases stay 0.

        ``cfg.initializer_range`` is the standard deviation for "gpt2", the gain for other modes.
        """
        draw = _INITIALISATIONS[self.cfg.init_mode]
        for name, parameter in self.named_parameters():
            if "W_" in name:
                draw(parameter, self.cfg.initializer_range)

    set_use_attn_result = _setter(
        "use_attn_result",
        "Set whether ``hook_result`` fires with what heads write, [batch, pos, head, d_model].",
    )
    set_use_split_qkv_input = _setter(
        "use_split_qkv_input",
        "Set whether queries, keys and values of each head have inputs of their own.\n\n"
        "``hook_q_input``, ``hook_k_input`` and ``hook_v_input`` then fire with these, [batch, "
        "pos, head, d_model].",
    )
    set_use_attn_in = _setter(
        "use_attn_in",
        "Set whether each head has an input of its own.\n\n``hook_attn_in`` then fires with it, "
        "[batch, pos, head, d_model]; with ``use_split_qkv_input`` its edits have no effect.",
    )

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Set whether ``hook_mlp_in`` fires with what enters the MLP's norm, [batch, pos, d_model].

        Raises:
            InfoFlowError: for an attention-only model.
        """
        if self.cfg.attn_only and use_hook_mlp_in:
            raise InfoFlowError(
                "the model is attention-only and has no hook_mlp_in: expected a model with d_mlp"
            )
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # What ActivationCache and the tools of TransformerLens read from a model

    @property
    def heads_of_layers(self) -> tuple[int, ...]:
        """The number of heads of each layer."""
        return tuple(block.attn.W_Q.shape[0] for block in self.blocks)

    @property
    def n_params_total(self) -> int:
        """The number of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    W_E = _parameter_of(
        "embed", "W_E", "of the embedding, [d_vocab, d_model]; of vectors, [d_token, d_model]"
    )
    W_pos = _parameter_of("pos_embed", "W_pos", "of the positions, [n_ctx, d_model]")
    W_U = _parameter_of("unembed", "W_U", "of the read-out, [d_model, d_output]")
    b_U = _parameter_of("unembed", "b_U", "of the read-out, [d_output]")
    W_Q = _stack_layers("attn", "W_Q", "[layer, head, d_model, d_head]")
    W_K = _stack_layers("attn", "W_K", "[layer, head, d_model, d_head]")
    W_V = _stack_layers("attn", "W_V", "[layer, head, d_model, d_head]")
    W_O = _stack_layers("attn", "W_O", "[layer, head, d_head, d_model]")
    b_Q = _stack_layers("attn", "b_Q", "[layer, head, d_head]")
    b_K = _stack_layers("attn", "b_K", "[layer, head, d_head]")
    b_V = _stack_layers("attn", "b_V", "[layer, head, d_head]")
    b_O = _stack_layers("attn", "b_O", "[layer, d_model]")
    W_in = _stack_layers("mlp", "W_in", "[layer, d_model, d_mlp]")
    b_in = _stack_layers("mlp", "b_in", "[layer, d_mlp]")
    W_out = _stack_layers("mlp", "W_out", "[layer, d_mlp, d_model]")
    b_out = _stack_layers("mlp", "b_out", "[layer, d_model]")

    @property
    def W_E_pos(self) -> Float[Tensor, "n d_model"]:
        """Rows of W_E, then of W_pos, [d_vocab + n_ctx, d_model]; for vectors d_token + n_ctx."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each layer and head, in factors: [layer, head, d_model, d_model]."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each layer and head, in factors: [layer, head, d_model, d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)

    def all_head_labels(self) -> list[str]:
        """Return L0H0, L0H1, ..., with the heads that each layer has."""
        return [
            f"L{layer}H{head}"
            for layer, heads in enumerate(self.heads_of_layers)
            for head in range(heads)
        ]

    accumulated_bias = sum_biases
    tokens_to_residual_directions = find_directions

    def to_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse texts, as the model has no tokenizer.

        Raises:
            InfoFlowError: always.
        """
        raise InfoFlowError(
            "the model has no tokenizer: expected vectors or token ids as a task gives them, no "
            "text"
        )

    def to_single_token(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a word, as the model has no tokenizer.

        Raises:
            InfoFlowError: always.
        """
        raise InfoFlowError("the model has no tokenizer: expected the number of an output, no text")

"""Models over vector tokens, and over token ids: made, saved and loaded.

TransformerLens's facilities work on a hosted model (caching, hooks, patching, partial runs, dtypes,
state dicts); what differs is the input, [batch, pos, d_token] real vectors, the CLS token that the
model appends, and the number of heads, which may change from layer to layer. So read head counts
from tensors, never from ``cfg.n_heads``; where they differ, what takes the heads of all layers from
one number is refused. What the models are made of is in :mod:`infoflow_lens.models.hooked`.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import atomic_path, writable_folder, write_json
from infoflow_lens.foundation.names import nearest
from infoflow_lens.foundation.seeds import check_seed
from infoflow_lens.models.architecture import Architecture
from infoflow_lens.models.attention import AttentionKind, set_attention
from infoflow_lens.models.hooked import Attention, HookedModel, TokenEmbed, hooked_config
from infoflow_lens.models.token_architecture import TOKEN_INITS, TokenArchitecture, TokenInit


class VectorEmbed(nn.Module):
    """Encodes vector tokens and appends the CLS token.

    Takes [batch, pos, d_token], returns [batch, pos + 1, d_model].
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        d_input = architecture.d_token
        self.hidden_fn = SUPPORTED_ACTIVATIONS[architecture.act_fn]
        if architecture.d_encoder is not None:
            self.W_hidden = nn.Parameter(torch.empty(d_input, architecture.d_encoder))
            self.b_hidden = nn.Parameter(torch.zeros(architecture.d_encoder))
            d_input = architecture.d_encoder
        self.W_E = nn.Parameter(torch.empty(d_input, architecture.d_model))
        self.b_E = nn.Parameter(torch.zeros(architecture.d_model))
        self.W_cls = nn.Parameter(torch.empty(1, architecture.d_model))

    def forward(self, x: Float[Tensor, "batch pos d_token"]) -> Float[Tensor, "batch all d_model"]:
        """Encode tokens and put CLS behind them."""
        if hasattr(self, "W_hidden"):
            x = self.hidden_fn(x @ self.W_hidden + self.b_hidden)
        tokens = x @ self.W_E + self.b_E
        cls = self.W_cls.expand(x.shape[0], 1, -1)
        return torch.cat([tokens, cls], dim=1)


class VectorTransformer(HookedModel):
    """A hooked Transformer that reads vector tokens and answers at its CLS token.

    ``model(x)`` takes [batch, pos, d_token] with pos = T and returns [batch, d_output]. In hooks
    and caches the position axis has length T + 1: tokens 0 .. T - 1, then CLS. ``hook_tokens``
    carries the input vectors; ``hook_embed`` the encoded tokens and CLS. Build one with
    :func:`build_model`.
    """

    reads_vectors = True  # tells probes that hook_tokens carries the input vectors

    def __init__(self, architecture: Architecture, device: str = "cpu") -> None:
        beta = architecture.attn_scale
        with_positions = architecture.positional_embedding == "learned"
        cfg = hooked_config(
            n_layers=architecture.n_layers,
            d_model=architecture.d_model,
            n_ctx=architecture.n_tokens + 1,
            n_heads=architecture.n_heads[0],
            d_head=architecture.head_dimensions[0],
            d_mlp=architecture.d_mlp or None,
            attn_only=architecture.d_mlp == 0,
            act_fn=architecture.act_fn,
            d_vocab=1,  # no vocabulary: tokens are vectors
            d_vocab_out=architecture.d_output,
            normalization_type=None if architecture.normalization == "none" else "LN",
            attn_scale=-1.0 if beta is None else 1 / beta,
            attention_dir="bidirectional",
            positional_embedding_type="standard" if with_positions else "none",
            use_hook_tokens=True,
            init_mode=architecture.init_mode,
            device="cpu",
        )
        sizes = zip(architecture.n_heads, architecture.head_dimensions, strict=True)
        attention = [
            Attention(
                cfg,
                heads,
                d_head,
                np.sqrt(d_head) if beta is None else 1 / beta,
                last_is_key=architecture.cls_is_key,
            )
            for heads, d_head in sizes
        ]
        super().__init__(cfg, VectorEmbed(architecture), attention)
        self.architecture = architecture
        self.init_weights()
        self.to(device)
        set_attention(self, architecture.attention)

    @property
    def n_keys(self) -> int:
        """How many positions can be attended to: T, or T + 1 where CLS is a key."""
        return self.architecture.n_tokens + int(self.architecture.cls_is_key)

    def check_input(self, x: Tensor) -> None:
        """Refuse input that is no batch of this model's tokens.

        Raises:
            InfoFlowError: for a wrong shape or dtype.
        """
        arch, dtype = self.architecture, self.embed.W_E.dtype
        if not isinstance(x, Tensor) or x.ndim != 3 or 0 in x.shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InfoFlowError(
                f"input is {shape}: expected vector tokens [batch, {arch.n_tokens}, {arch.d_token}]"
            )
        if x.shape[2] != arch.d_token:
            raise InfoFlowError(
                f"tokens have dimension {x.shape[2]}, the model expects d_token {arch.d_token}: "
                "build the model and load the task with the same d_token"
            )
        if x.shape[1] != arch.n_tokens:
            raise InfoFlowError(
                f"sequences have {x.shape[1]} tokens, the model expects n_tokens {arch.n_tokens} "
                "(without CLS, which it appends): use the same n_tokens for model and data"
            )
        if x.dtype != dtype:
            raise InfoFlowError(
                f"tokens are {x.dtype}, the model's weights {dtype}: convert with x.to({dtype})"
            )

    def embedded(
        self, input: Float[Tensor, "batch pos d_token"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch all d_model"]:
        """Encode vector tokens, append CLS, add positions."""
        self.check_input(input)
        tokens = self.hook_tokens(input.to(self.embed.W_E.device))
        return self.with_positions(self.hook_embed(self.embed(tokens)))

    def forward(
        self,
        input: Tensor,
        return_type: str | None = "logits",
        *,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        attention_mask: Tensor | None = None,
        past_kv_cache: Any = None,
        **ignored: Any,
    ) -> Tensor | None:
        """Run the model.

        Args:
            input: tokens [batch, pos, d_token]; with `start_at_layer`, the residual stream
                [batch, pos + 1, d_model] that enters that layer.
            return_type: "logits" for the output at CLS, None for nothing.
            start_at_layer: first layer to run, as in TransformerLens.
            stop_at_layer: layer before which to stop; then the residual stream is returned.
            attention_mask: None; every sequence has n_tokens tokens.
            past_kv_cache: None; CLS reads all tokens at once.
            ignored: arguments of TransformerLens that are about text.

        Returns:
            The output read at CLS, [batch, d_output] (eq 2).

        Raises:
            InfoFlowError: for input of a wrong shape or dtype, a loss as return type, or an unknown
                argument.
        """
        if return_type not in ("logits", None):
            raise InfoFlowError(
                f"return_type is {return_type!r}: a model over vector tokens has no next-token "
                "loss; take the output ('logits') and compare it with the target"
            )
        if attention_mask is not None or past_kv_cache is not None:
            raise InfoFlowError(
                "vector tokens take no attention_mask and no past_kv_cache: every sequence has "
                f"{self.architecture.n_tokens} tokens; leave both out"
            )
        _check_ignored(ignored)
        residual = input if start_at_layer is not None else self.embedded(input)
        residual = self.run_layers(residual, start_at_layer, stop_at_layer)
        if stop_at_layer is not None:
            return residual
        output = self.read_out(residual)
        return output[:, -1] if return_type is not None else None

    def forward_readout(
        self, x: Float[Tensor, "batch pos d_token"]
    ) -> Float[Tensor, "batch d_output"]:
        """The numbers of ``model(x)``, computed faster: the last block runs for CLS only.

        Nothing but CLS is read from the last block (eq 2), so training needs no other row of it.
        Hooks of the last block see a single query here: probe ``model(x)`` instead.
        """
        return self.at_the_last_position(x)


class TokenTransformer(HookedModel):
    """An attention-only hooked Transformer over token ids, read at its last position.

    ``model(x)`` takes [batch, pos] and returns logits [batch, pos, d_output], of which
    ``model(x)[:, -1]`` counts. Biases are zero and fixed; the other weights wait to be
    set. Build one with :func:`build_token_model`.
    """

    def __init__(self, architecture: TokenArchitecture, device: str = "cpu") -> None:
        cfg = hooked_config(
            n_layers=architecture.n_layers,
            n_heads=architecture.n_heads[0],
            d_head=architecture.d_head,
            d_model=architecture.d_model,
            n_ctx=architecture.n_tokens,
            d_vocab=architecture.d_vocab,
            d_vocab_out=architecture.d_output,
            attn_only=True,
            normalization_type=None,
            attention_dir="bidirectional",
            positional_embedding_type="standard",
            use_attn_scale=False,
            device="cpu",
        )
        attention = [
            Attention(cfg, heads, architecture.d_head, attn_scale=1.0)
            for heads in architecture.n_heads
        ]
        super().__init__(cfg, TokenEmbed(cfg), attention)
        self.architecture = architecture
        for name, parameter in self.named_parameters():
            if "b_" in name:
                parameter.requires_grad_(False)
        self.to(device)
        set_attention(self, architecture.attention)

    def check_input(self, tokens: Tensor, attention_mask: Tensor | None = None) -> None:
        """Refuse input that is no batch of this model's tokens.

        Raises:
            InfoFlowError: for text, floats, too many tokens, or a mask of another shape.
        """
        longest = self.architecture.n_tokens
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
            given = type(tokens).__name__
            if isinstance(tokens, Tensor):
                given = f"{tokens.dtype} {tuple(tokens.shape)}"
            raise InfoFlowError(
                f"input is {given}: expected token ids [batch, pos], with at most {longest} "
                "positions; a hosted model has no tokenizer"
            )
        if tokens.shape[1] > longest:
            raise InfoFlowError(
                f"sequences have {tokens.shape[1]} tokens, the model takes {longest}: build it "
                f"with n_tokens {tokens.shape[1]}"
            )
        if attention_mask is not None and attention_mask.shape != tokens.shape:
            raise InfoFlowError(
                f"attention_mask has shape {tuple(attention_mask.shape)}: expected that of the "
                f"tokens, {tuple(tokens.shape)}"
            )

    def embedded(
        self, input: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Embeddings of tokens and positions."""
        tokens = input[None] if isinstance(input, Tensor) and input.ndim == 1 else input
        self.check_input(tokens, attention_mask)
        tokens = tokens.to(self.embed.W_E.device)
        return self.with_positions(self.hook_embed(self.embed(tokens)), attention_mask)

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
            input: token ids [batch, pos], or [pos] for one sequence; with `start_at_layer`, the
                residual stream [batch, pos, d_model] that enters that layer.
            return_type: "logits", or None for nothing.
            start_at_layer: first layer to run, as in TransformerLens.
            stop_at_layer: layer before which to stop; then the residual stream is returned.
            attention_mask: 0 for padding, which is no key for any query; positions count from the
                first token. With `start_at_layer`, give it again.
            past_kv_cache: None; the model is bidirectional, so that earlier positions depend on
                later ones.
            ignored: arguments of TransformerLens that are about text.

        Returns:
            Logits [batch, pos, d_output].

        Raises:
            InfoFlowError: for input of a wrong kind or shape, a loss as return type, or an unknown
                argument.
        """
        if return_type not in ("logits", None):
            raise InfoFlowError(
                f"return_type is {return_type!r}: the model gives labels and has no next-token "
                "loss; take the logits at the last position and compare them with the label"
            )
        if past_kv_cache is not None:
            raise InfoFlowError(
                "past_kv_cache is given, but the model is bidirectional: earlier positions depend "
                "on later ones; run the whole sequence"
            )
        _check_ignored(ignored)
        if attention_mask is not None:
            attention_mask = attention_mask.to(self.unembed.W_U.device)
        residual = input
        if start_at_layer is None:
            residual = self.embedded(input, attention_mask)
        residual = self.run_layers(residual, start_at_layer, stop_at_layer, attention_mask)
        if stop_at_layer is not None:
            return residual
        output = self.read_out(residual)
        return output if return_type is not None else None

    def forward_readout(self, x: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch d_output"]:
        """The numbers of ``model(x)[:, -1]``, computed faster: the last block runs there only.

        Hooks of the last block see a single query here: probe ``model(x)`` instead.
        """
        return self.at_the_last_position(x)


# HookedTransformer's forward takes them; they are about text, or about other kinds of positions
_ABOUT_TEXT = ("loss_per_token", "prepend_bos", "padding_side", "tokens", "shortformer_pos_embed")


def _check_ignored(given: dict[str, Any]) -> None:
    if unknown := sorted(set(given) - set(_ABOUT_TEXT)):
        raise InfoFlowError(
            f"unknown argument {', '.join(unknown)}: expected return_type, start_at_layer, "
            "stop_at_layer or attention_mask"
        )


def build_model(
    architecture: Architecture, seed: int = 0, device: str = "cpu"
) -> VectorTransformer:
    """A freshly initialised model; the same seed gives the same weights.

    The global random state is left as it was.

    Raises:
        InfoFlowError: for what is no Architecture.
    """
    if not isinstance(architecture, Architecture):
        raise InfoFlowError(
            f"architecture is a {type(architecture).__name__}: expected an Architecture; make one "
            "of heads and sizes, or load a model by name with load_any"
        )
    with _seeded(seed):
        return VectorTransformer(architecture, device)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # the CPU's generator alone: torch.manual_seed would reseed those of accelerators
        torch.default_generator.manual_seed(check_seed(seed))
        yield


def _zero_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def zero_model(architecture: Architecture) -> VectorTransformer:
    """A model whose weights are all zero, for weights that are set by hand."""
    model = build_model(architecture)
    _zero_weights(model)
    return model


def build_token_model(
    *,
    n_layers: int,
    n_heads: int | tuple[int, ...] | list[int],
    d_head: int,
    d_model: int,
    n_tokens: int,
    d_vocab: int,
    d_output: int,
    attention: AttentionKind = "relu",
    init: TokenInit = "random",
    one_hot: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> TokenTransformer:
    """A freshly initialised attention-only model over token ids, as in eq 2 of Chen & Zou 2024.

    It is bidirectional, without normalization, biases or a factor on the scores, gives logits
    [batch, pos, d_output] and is read at the last position. The same seed gives the same weights;
    the global random state is left as it was.

    Args:
        n_layers: L.
        n_heads: heads of every layer, or one number for each.
        d_head: dimension of queries, keys and values; `d_model` in the paper.
        d_model: d'.
        n_tokens: n.
        d_vocab: d.
        d_output: C, the number of labels.
        attention: "relu" (the paper's), "softmax" or "hardmax".
        init: "random" for TransformerLens's own, normal with deviation 0.8 / sqrt(d_model).
            "chen_zou" for the paper's (Sec. 9.1), which trains W_QK and W_V whole: W_QK and the
            classifier uniform on [0, 1), W_V the identity [the paper: "a value of 1"]. There W_Q
            holds W_QK^T, and W_K, the identity, and W_O, the 1 / m of eq 2, are fixed. It needs
            ``d_head = d_model`` and implies `one_hot`.
        one_hot: tokens and positions enter as fixed one-hot columns (eq 3), tokens first, as in the
            constructions; else their embeddings are trained. Needs ``d_model >= d_vocab +
            n_tokens``.
        seed: of the weights.
        device: where to put the model.

    Raises:
        InfoFlowError: for sizes below 1 or that do not fit each other, or an unknown choice.
    """
    architecture = TokenArchitecture.of_layers(
        n_layers,
        n_heads,
        d_head=d_head,
        d_model=d_model,
        n_tokens=n_tokens,
        d_vocab=d_vocab,
        d_output=d_output,
        attention=attention,
    )
    if init not in TOKEN_INITS:
        raise InfoFlowError(f"init is {init!r}{nearest(init, TOKEN_INITS)}")
    if init == "chen_zou" and d_head != d_model:
        raise InfoFlowError(
            f"d_head is {d_head} and d_model {d_model} with init 'chen_zou', which has whole "
            f"matrices W_QK and W_V: expected d_head {d_model}, or init 'random'"
        )
    if (one_hot or init == "chen_zou") and d_model < d_vocab + n_tokens:
        raise InfoFlowError(
            f"d_model is {d_model}: one-hot tokens and positions need d_vocab + n_tokens = "
            f"{d_vocab + n_tokens}; raise d_model, or train the embeddings (init 'random' and "
            "one_hot False)"
        )
    with _seeded(seed):
        model = TokenTransformer(architecture)
        model.init_weights()
        if one_hot or init == "chen_zou":
            _enter_as_one_hot(model)
        if init == "chen_zou":
            _initialise_as_chen_zou(model)
    return model.to(device) if device != "cpu" else model


def _fix(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
    parameter.requires_grad_(False)


def _enter_as_one_hot(model: TokenTransformer) -> None:
    sizes = model.architecture
    units = torch.eye(sizes.d_model)
    _fix(model.embed.W_E, units[: sizes.d_vocab])
    _fix(model.pos_embed.W_pos, units[sizes.d_vocab : sizes.d_vocab + sizes.n_tokens])


def _initialise_as_chen_zou(model: TokenTransformer) -> None:
    identity = torch.eye(model.architecture.d_model)
    for block, heads in zip(model.blocks, model.architecture.n_heads, strict=True):
        nn.init.uniform_(block.attn.W_Q)
        _fix(block.attn.W_K, identity)
        with torch.no_grad():
            block.attn.W_V.copy_(identity)
        _fix(block.attn.W_O, identity / heads)
    nn.init.uniform_(model.unembed.W_U)


def zero_token_model(architecture: TokenArchitecture) -> TokenTransformer:
    """An attention-only model over token ids, whose weights are all zero."""
    model = TokenTransformer(architecture)
    _zero_weights(model)
    return model


def save_model(model: VectorTransformer | TokenTransformer, folder: str | os.PathLike[str]) -> None:
    """Write ``architecture.json`` and ``model.safetensors`` to `folder`.

    Of a model over token ids it keeps, too, which parameters are fixed.

    Raises:
        InfoFlowError: if the folder cannot be written, or the model is none of ours.
    """
    if not isinstance(model, (VectorTransformer, TokenTransformer)):
        raise InfoFlowError(
            f"model is a {type(model).__name__}: expected one of build_model, build_token_model or "
            "build_construction; of others save the state_dict"
        )
    settings = _as_it_is(model).to_dict()
    if isinstance(model, TokenTransformer):
        fixed = [name for name, p in model.named_parameters() if not p.requires_grad]
        settings["fixed"] = fixed
    path = writable_folder(folder)
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    with atomic_path(path / "model.safetensors") as temporary:
        save_file(state, temporary)
    write_json(path / "architecture.json", settings)


def _as_it_is(model: VectorTransformer | TokenTransformer) -> Architecture | TokenArchitecture:
    """The architecture, with the attention that `set_attention` may have changed since."""
    kinds: set[Any] = {
        getattr(block.attn.hook_pattern, "kind", "softmax") for block in model.blocks
    }
    if len(kinds) > 1:
        raise InfoFlowError(
            f"the layers have different attention ({', '.join(sorted(kinds))}): expected one kind "
            "in all; set it with set_attention"
        )
    return dataclasses.replace(model.architecture, attention=kinds.pop())


def load_model(
    folder: str | os.PathLike[str], device: str = "cpu"
) -> VectorTransformer | TokenTransformer:
    """The model that :func:`save_model` wrote to `folder`.

    Raises:
        InfoFlowError: if the folder holds no such model.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InfoFlowError(
            f"folder is a {type(folder).__name__}: expected a folder that save_model wrote; a "
            "model in memory is hosted by load_any(model)"
        )
    path = Path(folder)
    missing = [n for n in ("architecture.json", "model.safetensors") if not (path / n).is_file()]
    if missing:
        raise InfoFlowError(
            f"{str(folder)!r} is no saved model ({' and '.join(missing)} missing): "
            "expected a folder written by save_model"
        )
    try:
        settings = json.loads((path / "architecture.json").read_text(encoding="utf-8"))
        model = _model_of(dict(settings), device)
        state = load_file(path / "model.safetensors", device=device)
        dtype = state["embed.W_E"].dtype
        if dtype != torch.float32:
            model.to(dtype)
        model.load_state_dict(state)
    except (
        TypeError,
        ValueError,  # of JSON, too
        KeyError,
        RuntimeError,
        SafetensorError,
    ) as error:
        if isinstance(error, InfoFlowError):
            raise
        raise InfoFlowError(
            f"the model in {str(folder)!r} cannot be read ({error}): expected a folder written by "
            "save_model"
        ) from error
    return model


def _model_of(settings: dict[str, Any], device: str) -> VectorTransformer | TokenTransformer:
    """An untrained model of the sizes that were saved."""
    kind = settings.get("kind", "vector")
    if kind == "vector":
        return build_model(Architecture.from_dict(settings), device=device)
    if kind != "token":
        raise InfoFlowError(
            f"the saved model is of kind {kind!r}: expected 'token', or none for vector tokens"
        )
    fixed = set(settings.pop("fixed", ()))
    model = TokenTransformer(TokenArchitecture.from_dict(settings), device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return model

"""What the theory needs to know of a model: heads, widths, masks, positions, layer by layer.

A :class:`ModelShape` is read off an architecture of ours, a TransformerLens config or model, a
Hugging Face config or model, or a folder with a ``config.json``; nothing is loaded or run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from annotated_types import MinLen

from infoflow_lens.foundation.display import count
from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.files import read_json, user_path
from infoflow_lens.foundation.settings import Count, Remedy, settings

# the names that configs give to the same number
_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("n_layers", "num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("n_heads", "num_attention_heads", "n_head", "num_heads"),
    "width": ("d_model", "hidden_size", "n_embd", "dim"),
    "length": (
        "n_ctx", "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length",
    ),
    "key_value_heads": ("n_key_value_heads", "num_key_value_heads"),
    "head_width": ("d_head", "head_dim"),
    "window": ("window_size", "sliding_window", "attention_chunk_size"),
}  # fmt: skip
_REMEDY = "expected an object in JSON, as save_pretrained or save_model writes it"
ByLayer = Annotated[tuple[Count, ...], MinLen(1), Remedy("one for each layer")]
_BIDIRECTIONAL = (  # of transformers those that fill in masked words or mark words of texts
    "albert", "bert", "big_bird", "bros", "camembert", "canine", "convbert", "data2vec-text",
    "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert",
    "flaubert", "fnet", "funnel", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "layoutlmv2",
    "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "megatron-bert",
    "mobilebert", "modernbert", "modernvbert", "mpnet", "mra", "neomme", "nomic_bert",
    "nystromformer", "perceiver", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "splinter", "squeezebert", "tapas", "ultrabert", "ultravbert", "xlm",
    "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
    "align_text_model", "altclip_text_model", "chinese_clip_text_model", "flava_text_model",
    "siglip2_text_model", "siglip_text_model",
)  # fmt: skip
_LARGEST_SIZE = 10**7  # that transformers is given: it makes a list of so many layers
# what configs call a layer's attention; chunks are windows that do not move with the query
_LOCAL = ("local", "sliding_attention", "sliding", "chunked_attention")
_GLOBAL = ("global", "full_attention", "full", "attention")


@settings
class ModelShape:
    """The sizes and masks of a model, as far as information sets depend on them.

    Attributes:
        n_heads: h_1 .. h_L.
        d_model: E_1 .. E_L.
        n_tokens: T, or the most that the model takes where none is asked.
        positional: whether there is a positional encoding.
        causal: whether a position sees itself and earlier ones only; the read-out is then at the
            last one, which stands for CLS.
        windows: for every layer how many positions back a query sees, itself included; None for
            all.
        n_key_value_heads: heads of keys and values, for every layer; None where each has its own.
        d_head: n_1 .. n_L.
        routes: whether queries of the first layer come from a network with a hidden layer, so that
            a head can have several roles.
        has_mlp: whether there are feed-forward networks.
        source: what it was read off.
    """

    n_heads: ByLayer
    d_model: ByLayer
    n_tokens: Count
    positional: bool = False
    causal: bool = False
    windows: tuple[Count | None, ...] = ()
    n_key_value_heads: ByLayer | None = None
    d_head: ByLayer | None = None
    routes: bool = False
    has_mlp: bool = True
    source: str = "sizes"

    def __post_init__(self) -> None:
        n = len(self.n_heads)
        for name in ("d_model", "windows", "n_key_value_heads", "d_head"):
            values = getattr(self, name)
            if values and len(values) != n:
                raise InfoFlowError(
                    f"{name} has {len(values)} entries for {n} layers: give one for each"
                )

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.n_heads)

    def usable(self, n_tokens: int) -> tuple[bool, ...]:
        """Return the layers whose queries see all T tokens and CLS."""
        if not self.windows:
            return (True,) * self.n_layers
        # a window counts the query itself, so CLS sees all T tokens through one of T + 1
        return tuple(window is None or window > n_tokens for window in self.windows)

    def reach(self, n_tokens: int) -> int:
        """Count the tokens, of T before the read-out, that can reach it through all windows."""
        if not self.windows:
            return n_tokens
        far = 0
        for window in self.windows:
            if window is None:
                return n_tokens
            far += window - 1
        return min(n_tokens, far)

    def set_length(self, n_tokens: int) -> "ModelShape":
        """Return the same model on sequences of T tokens.

        Raises:
            InfoFlowError: for more than the model takes.
        """
        # a causal model reads at a position of its own behind the T tokens
        limit = self.n_tokens - 1 if self.causal else self.n_tokens
        if n_tokens > limit:
            raise InfoFlowError(
                f"n_tokens is {n_tokens}, but {self.source} takes {limit}"
                f"{' and the position that is read' if self.causal else ''}: expected at most that"
            )
        return replace(self, n_tokens=n_tokens)

    def describe(self) -> str:
        """Return the sizes in words."""
        heads = _run_lengths(self.n_heads)
        widths = _run_lengths(self.d_model)
        words = [count(self.n_layers, "layer"), f"heads {heads}", f"E = {widths}"]
        words.append("causal, read at the last position" if self.causal else "bidirectional")
        local = [w for w in self.windows if w is not None]
        if local:
            words.append(
                f"{count(len(local), 'layer')} local (window {_run_lengths(sorted(set(local)))})"
            )
        if self.n_key_value_heads is not None and self.n_key_value_heads != self.n_heads:
            words.append(f"{_run_lengths(self.n_key_value_heads)} heads of keys and values")
        words.append("with positions" if self.positional else "without positions")
        return f"{self.source}: " + ", ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _run_lengths(values: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return str(values[0])
    return "(" + ", ".join(map(str, values)) + ")"


def shape_of(model: Any) -> ModelShape:
    """Return the shape of a model, by what it is.

    Args:
        model: a `ModelShape`; an `Architecture` or `TokenArchitecture`; a TransformerLens config or
            model; a Hugging Face config or model; or a folder (or its ``config.json``).

    Raises:
        InfoFlowError: for what is none of these, or lacks a size; and for models of another kind
            than the theory's: attention other than softmax, CLS as a key, encoders with decoders.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, str | os.PathLike):
        return _from_folder(user_path(model))
    own = getattr(model, "architecture", None)
    if own is not None and hasattr(own, "n_heads") and isinstance(own.n_heads, tuple):
        model = own
    if hasattr(model, "n_heads") and isinstance(model.n_heads, (tuple, list)):
        return _from_ours(model)
    # a model: of TransformerLens, or of Hugging Face
    for name in ("cfg", "config"):
        inner = _text_config(getattr(model, name, None))
        if not isinstance(inner, Mapping) and _first(inner, "layers"):
            return _from_config(inner, type(model).__name__)
    config = _text_config(model)
    if _first(config, "layers") is not None:
        return _from_config(config, _name_of(config))
    raise InfoFlowError(
        f"{type(model).__name__} has no sizes of a Transformer: expected an Architecture, a "
        "config or model of TransformerLens or Hugging Face, or a folder with a config.json"
    )


def _name_of(config: Any) -> str:
    for name in ("model_name", "name_or_path", "_name_or_path", "model_type"):
        value = _get(config, name)
        if isinstance(value, str) and value and value != "custom":
            return value
    return type(config).__name__


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _first(config: Any, what: str) -> Any:
    return next((v for v in (_get(config, name) for name in _NAMES[what]) if v is not None), None)


def _list_by_layer(config: Any, what: str, n: int) -> list[Any]:
    """List a number of every layer; some configs name the layers where it differs, as Gemma 4's."""
    own = _get(config, "per_layer_config")
    if own is None:
        return [_first(config, what)] * n
    if not isinstance(own, Mapping):
        return [_first(own[layer], what) for layer in range(n)]
    named = {int(layer): _first(values, what) for layer, values in own.items()}
    return [named.get(layer) or _first(config, what) for layer in range(n)]


def _text_config(config: Any) -> Any:
    """Return the config of the part that reads texts, where a model reads pictures, too."""
    inner = _get(config, "text_config")
    return config if inner is None or _first(config, "layers") is not None else inner


def _from_ours(architecture: Any) -> ModelShape:
    attention = getattr(architecture, "attention", "softmax")
    # a model of ours over tokens has no token width
    tokens = getattr(architecture, "d_token", None) is None
    if attention not in ("softmax", "hardmax") and not tokens:
        raise InfoFlowError(
            f"attention is {attention!r}: the theory is of softmax attention, whose heads pick one "
            "key; expected 'softmax' or 'hardmax'"
        )
    if getattr(architecture, "cls_is_key", False):
        raise InfoFlowError(
            "cls_is_key is True: in the theory's model CLS is no key (eq 1); expected False"
        )
    return ModelShape(
        n_heads=tuple(architecture.n_heads),
        d_model=(architecture.d_model,) * len(architecture.n_heads),
        n_tokens=architecture.n_tokens,
        # models of ours over token ids always embed positions
        positional=tokens or getattr(architecture, "positional_embedding", "none") != "none",
        d_head=getattr(architecture, "head_dimensions", None),
        routes=getattr(architecture, "d_encoder", None) is not None,
        has_mlp=not tokens and getattr(architecture, "d_mlp", 1) != 0,
        source=type(architecture).__name__,
    )


def _from_config(config: Any, source: str) -> ModelShape:
    if _get(config, "is_encoder_decoder"):
        raise InfoFlowError(
            f"{source} is an encoder with a decoder: expected one stack of blocks, such as gpt2"
        )
    sizes = {name: _first(config, name) for name in ("layers", "heads", "width", "length")}
    lacking = [name for name in ("layers", "heads", "width") if not _is_size(sizes[name])]
    if lacking:
        raise InfoFlowError(
            f"{source} has no {' and no '.join(lacking)}: expected a config with "
            + ", ".join(_NAMES[name][0] for name in lacking)
        )
    n = int(sizes["layers"])
    causal = _is_causal(config)
    heads = int(sizes["heads"])
    shared = _list_by_layer(config, "key_value_heads", n)
    widths = _list_by_layer(config, "head_width", n)
    kind = _get(config, "positional_embedding_type")
    return ModelShape(
        n_heads=(heads,) * n,
        d_model=(int(sizes["width"]),) * n,
        # a config without a length sets no bound
        n_tokens=int(sizes["length"]) if _is_size(sizes["length"]) else 2**31,
        positional=kind not in ("none", "nope"),
        causal=causal,
        windows=_windows(config, n, source, causal),
        n_key_value_heads=tuple(shared) if all(map(_is_size, shared)) else None,
        d_head=tuple(int(width or sizes["width"] // heads) for width in widths),
        # tokens are looked up in a table, which gives every token the query that it needs
        routes=True,
        has_mlp=not bool(_get(config, "attn_only")),
        source=source,
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_causal(config: Any) -> bool:
    """Say whether tokens see earlier ones alone: as the config says, else by its kind of model."""
    if direction := _get(config, "attention_dir"):
        return bool(direction != "bidirectional")
    # kinds of models that have both forms say which by one of these
    if any(_get(config, name) is True for name in ("is_decoder", "causal")):
        return True
    both_ways = bool(_get(config, "use_bidirectional_attention"))
    return not both_ways and _get(config, "model_type") not in _BIDIRECTIONAL


def _windows(config: Any, n: int, source: str, causal: bool) -> tuple[int | None, ...]:
    kinds = _get(config, "layer_types") or _get(config, "attn_types")
    if kinds is None:
        kinds = _get(config, "attention_layers")  # GPT-Neo
    other = sorted({str(kind) for kind in kinds or () if kind not in (*_LOCAL, *_GLOBAL)})
    if other:
        raise InfoFlowError(
            f"{source} has layers of kind {', '.join(map(repr, other))}: the theory is of softmax "
            "attention in every layer; expected 'full_attention' or 'sliding_attention'"
        )
    if _get(config, "use_sliding_window") is False:
        return ()
    if kinds is None and _get(config, "use_local_attn") is False:
        return ()
    if kinds is None:
        kinds = ("local",)
    found = tuple(
        # a bidirectional window counts the tokens to one side, without the query itself
        window + (not causal) if _is_size(window) and kinds[layer % len(kinds)] in _LOCAL else None
        # configs may name one period of a pattern that repeats
        for layer, window in enumerate(_list_by_layer(config, "window", n))
    )
    return found if any(found) else ()


def _add_defaults(values: Any) -> Any:
    """Return a config file with what transformers adds, such as which layers are local.

    Older files leave that out. Numbers and kinds of layers alone are given to transformers: texts
    may name parts that it would fetch from the hub, and labels take memory.
    """
    from transformers import CONFIG_MAPPING

    given = {
        name: value
        for name, value in values.items()
        if name != "num_labels" and (value is None or _is_number(value) or _are_kinds(value))
    }
    try:
        made = CONFIG_MAPPING[values["model_type"]].from_dict(given).to_dict()
    except Exception:  # no kind, an unknown one, or values that it refuses
        return values
    return {**made, **{name: value for name, value in values.items() if value is not None}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST_SIZE


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(kind, str) for kind in value)


def _from_folder(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    # a folder of ours says its heads itself; others have a config of transformers
    ours = path / "architecture.json"
    if path.is_dir() and not file.is_file() and ours.is_file():
        sizes = read_json(ours, "config of a model", _REMEDY)
        return replace(_from_ours(SimpleNamespace(**sizes)), source=str(path))
    if not file.is_file():
        raise InfoFlowError(
            f"there is no file {str(file)!r}: expected a folder with a config.json, as "
            "save_pretrained writes it"
        )
    values = _add_defaults(_text_config(read_json(file, "config of a model", _REMEDY)))
    return replace(_from_config(values, _name_of(values)), source=path.name)

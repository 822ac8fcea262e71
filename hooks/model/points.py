"""Hook points by name, and what can be read off a model without running it.

TransformerLens ignores some hook names that never fire and omits others by architecture, so the
names are resolved here, before work starts.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infoflow_lens.foundation.errors import InfoFlowError
from infoflow_lens.foundation.modules import outside_user_modes

TOKENS = "hook_tokens"
# what to do where a bridge lacks or loses something
INSTEAD_OF_A_BRIDGE = "give the model that it hosts, or its name, which is opened as it is"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
FoundT = TypeVar("FoundT")


def takes_model(function: FunctionT) -> FunctionT:
    """Return a function whose argument `model` may be any Transformer.

    A module without hook points is opened, see :func:`infoflow_lens.open_model`. In the place of
    anything that is no module, and holds one, such as what :func:`~infoflow_lens.load_any` gives,
    the function gets that. It runs outside of an inference mode of the user's, in which there are
    no derivatives.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with outside_user_modes():
            bound.arguments["model"] = ensure_hook_points(bound.arguments["model"])
            return function(*bound.args, **bound.kwargs)

    return cast(FunctionT, call)


def ensure_hook_points(model: Any) -> Any:
    """Return a model with hook points: what was given, or holds one, or is opened.

    Raises:
        InfoFlowError: for what is no model, for a module that cannot be opened, and as
            :func:`layer_count`.
    """
    if not isinstance(model, nn.Module):
        held = (getattr(model, name, None) for name in ("model", "_module", "_model"))
        model = next((module for module in held if isinstance(module, nn.Module)), model)
    if isinstance(model, nn.Module) and not hook_points(model) and not is_compiled(model):
        # by name: it alone of what probes need imports TransformerLens
        model = importlib.import_module("infoflow_lens.models.named").open_model(model)
    layer_count(model)  # what is behind this door need not ask whether it is a model
    return model


def is_compiled(model: nn.Module) -> bool:
    """Say whether a model runs code that torch.compile made, into which no hook sees."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def kind_of(model: nn.Module) -> str:
    """Return the name of a model's class; of an opened model, that of the class which was given."""
    return type(model.original_model if hasattr(model, "anatomy") else model).__name__


def config_value(model: nn.Module, name: str) -> Any:
    """Return what the config of a model with hook points says; None where it does not."""
    return getattr(getattr(model, "cfg", None), name, None)


def is_causal(model: nn.Module) -> bool:
    """Say whether a model sees the tokens up to a position alone; so far as is known, it does."""
    return bool(config_value(model, "attention_dir") != "bidirectional")


def layer_count(model: nn.Module) -> int:
    """Return the number of attention layers.

    Raises:
        InfoFlowError: if the model has no `blocks` and no hook points, that is, is neither opened
            nor from TransformerLens, or is compiled.
    """
    if is_compiled(model):
        raise InfoFlowError(
            f"the {type(model).__name__} is compiled, and compiled code leaves hooks out: expected "
            "the model itself; give what was given to torch.compile, and run that"
        )
    blocks = getattr(model, "blocks", None)
    if blocks is None or not hook_points(model) or len(blocks) == 0:
        raise InfoFlowError(
            f"{_words(model)} has no transformer blocks with hook points: expected a model that "
            f"is opened, or one of TransformerLens{_what_to_give(model)}"
        )
    return len(blocks)


def _words(model: object) -> str:
    return f"the name {model!r}" if isinstance(model, str) else type(model).__name__


def _what_to_give(model: Any) -> str:
    """Return the end of an error: where the model is that was meant."""
    if isinstance(model, str):
        return f"; give load_any({model!r}).model"
    if hasattr(getattr(model, "model", None), "hook_dict"):
        return "; give its .model"
    return "; give open_model(model)" if isinstance(model, nn.Module) else ""


def devices_of(model: nn.Module) -> list[str]:
    """Return the devices that a model's weights lie on."""
    return sorted(map(str, {parameter.device for parameter in model.parameters()}))


def check_one_device(model: nn.Module) -> None:
    """Refuse a model whose weights lie on several devices, or have no numbers.

    Raises:
        InfoFlowError: with the devices.
    """
    devices = devices_of(model)
    if "meta" in devices and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InfoFlowError(
            f"{type(model).__name__} is offloaded by accelerate, so that weights are there only "
            "while their module runs: expected all of them on one device; load it with "
            "device_map={'': 'cpu'}, or with one GPU in the place of 'cpu', and a smaller dtype "
            "where memory does not hold it"
        )
    if devices == ["meta"]:
        raise InfoFlowError(
            f"{type(model).__name__} is on the device 'meta', where weights have sizes and no "
            "numbers: expected loaded weights; load it with from_pretrained"
        )
    if len(devices) > 1:
        raise InfoFlowError(
            f"{type(model).__name__} has weights on several devices: {', '.join(devices)}; "
            "expected one, where probes put states and tokens together; move it to one"
        )


_known: WeakKeyDictionary[nn.Module, tuple[Any, Mapping[str, Any]]] = WeakKeyDictionary()


def hook_points(model: nn.Module) -> Mapping[str, Any]:
    """Return the hook points of a model by name; to be looked at, not changed.

    A bridge puts its table together at every look, which takes longer than a small layer. So it is
    kept as long as what it is made of is the same.
    """
    registry = getattr(model, "_hook_registry", None)
    if registry is None:
        return getattr(model, "hook_dict", {})
    made_of = (
        dict(registry),
        dict(getattr(model, "hook_aliases", {})),
        getattr(model, "compatibility_mode", None),
    )
    if model not in _known or _known[model][0] != made_of:
        _known[model] = (made_of, model.hook_dict)  # type: ignore[assignment]
    return _known[model][1]


def cache_by_mode(find: Callable[[nn.Module], FoundT]) -> Callable[[nn.Module], FoundT]:
    """Cache a function that runs a model to find something out, for each mode of the model.

    Users may switch the mode: masks, for example, are the lowest numbers of a precision, so they
    are others in another one. Of an opened model they may change the modules.
    """
    known: WeakKeyDictionary[nn.Module, tuple[Any, FoundT]] = WeakKeyDictionary()

    @functools.wraps(find)
    def call(model: nn.Module) -> FoundT:
        # first, as a model that has changed gets another anatomy, which is part of the mode
        refresh(model)
        precision = next((parameter.dtype for parameter in model.parameters()), None)
        kind = getattr(model, "compatibility_mode", None)
        mode = len(hook_points(model)), kind, precision, getattr(model, "anatomy", None)
        if model not in known or known[model][0] != mode:
            known[model] = (mode, find(model))
        return known[model][1]

    return call


@cache_by_mode
def list_trials(model: nn.Module) -> dict[Any, Any]:
    """Hold what trials have found of a model, by what was tried."""
    return {}


def refresh(model: nn.Module) -> None:
    """Let an opened model see whether it has changed."""
    getattr(model, "refresh", lambda: None)()


def hook_name(model: nn.Module, name: str) -> str:
    """Return `name`, if the model has that hook point.

    Raises:
        InfoFlowError: if not, with the reason of an opened model, and the hook points that this
            layer does have.
    """
    known = hook_points(model)
    if name in known:
        return name
    check_is_attention(model, name)
    block = name.rsplit(".hook_", 1)[0]
    siblings = sorted(other for other in known if other.startswith(block + "."))
    lacks: Any = getattr(model, "lacks", dict[str, str])
    why = f" ({reason})" if (reason := lacks().get(name)) else ""
    raise InfoFlowError(
        f"the model has no hook point {name!r}{why}: expected a model with that "
        f"activation; it has {', '.join(siblings) or 'no hook point there'}"
    )


def check_is_attention(model: nn.Module, name: str) -> None:
    """Refuse a hook point of attention in a layer of an opened model that has none.

    Raises:
        InfoFlowError: with what runs there.
    """
    lacks: Any = getattr(model, "lacks", dict[str, str])
    if why := lacks().get(name.rsplit(".hook_", 1)[0]):
        layers = ", ".join(map(str, layers_with_attention(model)))
        raise InfoFlowError(
            f"{name} is not there, as there is {why}: expected a layer with attention (here "
            f"{layers}), or attention in every layer where all are read; patterns, positions, "
            "influence, find_heads() and ask() take models that have it in some"
        )


def layers_with_attention(model: nn.Module) -> list[int]:
    """List the layers that have attention: all, but for opened models with other mixers."""
    lacks: Any = getattr(model, "lacks", dict[str, str])
    without = lacks()
    return [n for n in range(layer_count(model)) if f"blocks.{n}.attn" not in without]


def scores_hook(model: nn.Module, layer: int) -> str:
    """Return the hook point of the attention scores [batch, head, query, key] of a layer."""
    return hook_name(model, f"blocks.{layer}.attn.hook_attn_scores")


def attention_kind(model: nn.Module) -> str:
    """Name the map from scores to a pattern: "softmax", unless the pattern's hook has another."""
    point = hook_points(model).get("blocks.0.attn.hook_pattern")
    return str(getattr(point, "kind", "softmax"))


def pattern_hook(model: nn.Module, layer: int) -> str:
    """Return the hook point of the attention pattern [batch, head, query, key] of a layer."""
    return hook_name(model, f"blocks.{layer}.attn.hook_pattern")


def reads_vectors(model: nn.Module) -> bool:
    """Say whether the model reads real vectors, shown by ``hook_tokens``, instead of token ids."""
    return bool(getattr(model, "reads_vectors", False))


def has_own_attention(model: nn.Module) -> bool:
    """Say whether attention is TransformerLens's or ours, or is shown by the tap.

    Then closed keys have scores of -inf, and the model goes on with what hooks change. A
    TransformerBridge shows instead what the model of another library does, and may lose edits.
    """
    return not hasattr(model, "boot_transformers")  # of the model: it may be wrapped


def starts_at_layers(model: nn.Module) -> bool:
    """Say whether a forward pass of the model can start at a layer, from its residual stream.

    Bridges of TransformerLens 3 take the argument, and raise; those of 4 run the lower layers all
    the same, and give other logits for some architectures.
    """
    return (
        has_own_attention(model)
        and "start_at_layer" in inspect.signature(type(model).forward).parameters
    )


def position_count(model: nn.Module, n_tokens: int) -> int:
    """Count the positions of a sequence of `n_tokens`: models over vector tokens add CLS."""
    return n_tokens + reads_vectors(model)


def key_count(model: nn.Module, n_tokens: int) -> int:
    """Count the keys a query of a sequence of `n_tokens` has at most; CLS may be none (eq 1)."""
    attention = getattr(model.blocks[0], "attn", None)  # type: ignore[index]
    return position_count(model, n_tokens) - (not getattr(attention, "last_is_key", True))


def token_hook(model: nn.Module) -> str:
    """Return the hook point that carries the tokens as vectors.

    For a model over vector tokens these are the tokens themselves, [batch, pos, d_token]; for a
    model over token ids, their embeddings [batch, pos, d_model].
    """
    return hook_name(model, TOKENS if reads_vectors(model) else "hook_embed")


def layer_of(point: str) -> int | None:
    """Return the layer of a hook point; None for those outside of blocks."""
    parts = point.split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def check_finite(activation: Float[Tensor, "..."], name: str, sequence: int) -> None:
    """Refuse NaN and infinity in an activation.

    Raises:
        InfoFlowError: naming the hook point and the first sequence of the batch.
    """
    if activation.sum().isfinite():  # quicker than to look at each; one bad number spoils the sum
        return
    if not activation.isfinite().all():
        what = "NaN" if activation.isnan().any() else "infinity"
        raise InfoFlowError(
            f"{name} holds {what} in the batch that starts at sequence {sequence}: expected "
            "numbers; look for bad weights or inputs, or run in float32"
        )


def check_gives_numbers(model: nn.Module, output: Tensor | None) -> None:
    """Refuse a model that gives NaN by itself, for any tokens.

    Raises:
        InfoFlowError: naming the weights that are no numbers, or the precision that is too small.
    """
    if (
        output is None or not (output.isnan() | output.isposinf()).any()
    ):  # words may be barred by -infinity
        return
    bad = [name for name, weights in model.named_parameters() if not weights.isfinite().all()]
    why = f"{', '.join(bad[:3])} hold{'' if len(bad) > 1 else 's'} NaN or infinity"
    raise InfoFlowError(
        f"the {type(model).__name__} itself gives NaN or infinity for a few random tokens: "
        f"{why if bad else f'its numbers overflow in {output.dtype}'}; expected numbers; "
        f"{'repair these weights or download them again' if bad else 'load it in float32'}"
    )


def check_inputs(model: nn.Module, inputs: Tensor, name: str, *, any_length: bool = False) -> None:
    """Refuse what this model cannot read.

    Raises:
        InfoFlowError: naming the argument, its shape, dtype or values.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InfoFlowError(
            f"{name} is {shape}: expected a tensor, vector tokens [batch, pos, d_token] or token "
            "ids [batch, pos]"
        )
    if inputs.shape[0] == 0 or inputs.shape[1] == 0:
        raise InfoFlowError(
            f"{name} has shape {tuple(inputs.shape)}: expected at least one sequence and one token"
        )
    if inputs.is_complex():
        raise InfoFlowError(
            f"{name} is {inputs.dtype}: expected real vector tokens, or integers as token ids"
        )
    if inputs.is_floating_point() and not inputs.isfinite().all():
        bad = (~inputs.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()
        raise InfoFlowError(
            f"{name} holds NaN or infinite tokens, first in sequence {bad[0]} ({len(bad)} "
            "sequences): expected finite tokens; drop or repair them"
        )
    # models of ours check their own inputs; others read token ids
    check = getattr(model, "check_input", None)
    if check is not None:
        check(inputs)
    elif inputs.is_floating_point() or inputs.dtype == torch.bool or inputs.ndim != 2:
        raise InfoFlowError(
            f"{name} is {inputs.dtype} of shape {tuple(inputs.shape)}, where token ids are read: "
            "expected integers [batch, pos]; to measure a model that reads something else, call it "
            "yourself inside attach(model, probe)"
        )
    else:
        refresh(model)  # its embeddings may have another size by now
        vocabulary = config_value(model, "d_vocab")
        if inputs.min() < 0 or (vocabulary is not None and inputs.max() >= vocabulary):
            remedy = (
                "replace labels such as -100"
                if inputs.min() < 0
                else "take the tokenizer of this model; if its embeddings were resized after it "
                "was loaded, load it again"
            )
            raise InfoFlowError(
                f"{name} has token ids from {int(inputs.min())} to {int(inputs.max())}: expected 0 "
                f"to d_vocab - 1 ({(vocabulary or 0) - 1}); {remedy}"
            )
        n_ctx = config_value(model, "n_ctx")
        if n_ctx is not None and inputs.shape[1] > n_ctx and not any_length:
            what, ones, them = ("sequences of ", "shorter ones", "them")
            if len(inputs) == 1:
                what, ones, them = ("", "fewer", "it")
            raise InfoFlowError(
                f"{name} has {what}{inputs.shape[1]} tokens, the model takes at most n_ctx "
                f"{n_ctx}: expected {ones}; shorten or split {them}, or cut {them} where "
                "max_length is taken"
            )
